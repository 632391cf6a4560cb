"""Trainers as programs, on the tokens and models of the quick build."""

import json
import math

import pytest

PLACEMENT = {
    "nodes": 1,
    "gpus_per_node": 0,
    "zero_stage": 0,
    "offload": "none",
    "activation_checkpointing": False,
    "micro_batch_tokens": 300,
    "save_steps": 20,
    "threads": 1,
}


@pytest.fixture
def copy(quick, tmp_path):
    """The quick build, to be trained again in."""
    copy = quick.copy(tmp_path / "copy")
    copy.environment["OMP_NUM_THREADS"] = "1"
    return copy


def change(workflow, stage, **settings):
    """Give the tiny recipe of a stage other settings, by one more config file."""
    path = workflow.folder / "more.json"
    path.write_text(json.dumps({stage: {"recipes": {"tiny": settings}}}))
    workflow.options += (path.name,)


def lines_of(workflow, result):
    """The figures of a result, step by step."""
    lines = (workflow.folder / result / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_best_model_is_kept_and_training_stops_without_a_better_one(copy):
    # So fast that it soon becomes worse; in fp32, as merging adapters rounds in 16 bits.
    settings = {"learning_rate": 10.0, "epochs": 4, "eval_steps": 1, "patience": 2}
    change(copy, "sft", **settings, keep="best", dtype="fp32")
    copy.build("output/sft/tiny")
    first, *steps = lines_of(copy, "output/sft/tiny")
    assert first["step"] == 0 and "loss" not in first
    losses = [line["eval_loss"] for line in steps]
    best = losses.index(min(losses))
    assert len(losses) == best + 3 < 16
    assert min(losses) < losses[-1]
    figures = json.loads((copy.folder / "output/eval/sft/tiny/metrics.json").read_text())
    assert figures["before"]["perplexity"] == pytest.approx(math.exp(first["eval_loss"]), rel=1e-5)
    assert figures["after"]["perplexity"] == pytest.approx(math.exp(min(losses)), rel=1e-5)
    assert (copy.folder / "output/sft/tiny/adapter/adapter_model.safetensors").exists()


def test_a_reward_model_learns_by_each_token(copy):
    change(copy, "reward", loss="per_token")
    copy.build("output/reward/tiny")
    steps = lines_of(copy, "output/reward/tiny")
    last = lines_of(copy, "output/reward/tiny")[-1]
    assert last["loss"] < steps[0]["loss"]
    assert last["margin"] > 0


def test_a_run_that_diverges_says_after_which_step_and_on_which_rows(copy):
    change(copy, "sft", learning_rate=1.0e30)
    process = copy.snakemake("output/sft/tiny", "--cores", "1")
    assert process.returncode == 1
    assert "Traceback" not in process.stdout
    [line] = {line for line in process.stdout.splitlines() if line.startswith("error: ")}
    assert line.startswith("error: step 2, rows [")
    assert line.endswith("loss is nan, training has diverged: try a lower learning rate")


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo"])
def test_two_processes_train_as_one_does(stage, copy):
    spec = copy.folder / "spec.json"
    spec.write_text(json.dumps(copy.spec_of(f"output/{stage}/tiny")))
    before = lines_of(copy, f"output/{stage}/tiny")
    manifest = (copy.folder / f"output/{stage}/tiny.manifest.json").read_text()
    (copy.folder / f"output/{stage}/tiny/manifest.json").unlink()
    job = copy.run(
        *("python", "scripts/launch.py", "--standalone", "--nproc-per-node", "2"),
        *(f"scripts/train_{stage}.py", "--spec", str(spec)),
        *("--placement", json.dumps(PLACEMENT | {"nodes": 2, "zero_stage": 3})),
    )
    assert job.returncode == 0, job.stdout
    together = lines_of(copy, f"output/{stage}/tiny")
    assert [line.keys() for line in together] == [line.keys() for line in before]
    # In bf16, and Adam's first step takes rounding for a direction where there is no slope.
    whole, shared = (
        [line[name] for line in lines if line["step"] in (1, 2) for name in ("loss", "grad_norm")]
        for lines in (before, together)
    )
    assert shared == pytest.approx(whole, rel=0.03)
    # Another placement: the spec is the same, the bytes are not.
    again = (copy.folder / f"output/{stage}/tiny.manifest.json").read_text()
    assert json.loads(again)["spec"] == json.loads(manifest)["spec"]
