"""Training programs, in this process on a small model, and on the quick build."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_reward
from conftest import INIT
from snakechat.algorithms.preference import pairwise_loss
from snakechat.config.reward import RewardSettings
from snakechat.data.ragged_arrays import RaggedWriter
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Scorer, response_scores
from snakechat.modeling.loading import load_scorer
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from snakechat.workflow.placement import placement_of
from snakechat.workflow.run_options import RunOptions
from support.configs import load

# DeepSpeed calls functions of torch that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

PLACEMENT = placement_of({"micro_batch_tokens": 300})
REWARD_SETTINGS = load().program_settings("reward", "tiny")
REWARD_SETTINGS |= {"seed": 1, "epochs": 1, "global_batch_size": 4, "max_length": 16}
REWARD_SETTINGS |= {"learning_rate": 0.01, "lr_schedule": "constant", "min_lr_ratio": 0.0}
REWARD_SETTINGS |= {"template": "dialogue", "lora_alpha": 8}


@pytest.fixture
def copy(quick, tmp_path):
    """A copy of the quick build, to train in again."""
    copy = quick.copy(tmp_path / "copy")
    copy.environment["OMP_NUM_THREADS"] = "1"
    return copy


def change(workflow, stage, **settings):
    """Change settings of the tiny recipe of a stage, with another config file."""
    path = workflow.folder / "more.json"
    path.write_text(json.dumps({stage: {"recipes": {"tiny": settings}}}))
    workflow.options += (path.name,)


def lines_of(workflow, result):
    """Return the metrics of a result by step."""
    lines = (workflow.folder / result / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_perplexities_are_those_of_transformers(quick):
    model = AutoModelForCausalLM.from_pretrained(quick.folder / "output/sft/tiny").float()
    rows = Examples.read(quick.folder / "output/tokens/sft/tiny", "eval", "chosen")
    losses = {"": [], "response_": []}
    for prompt, response in zip(rows.prompts, rows.responses[0], strict=True):
        ids = torch.tensor([*map(int, prompt), *map(int, response)])
        logprobs = model(ids[None]).logits[0, :-1].detach().log_softmax(dim=-1)
        nats = -logprobs[range(len(ids) - 1), ids[1:]]
        losses[""] += nats.tolist()
        losses["response_"] += nats[len(prompt) - 1 :].tolist()
    metrics = json.loads((quick.folder / "output/eval/sft/tiny/metrics.json").read_text())
    for prefix, nats in losses.items():
        assert metrics["after"][f"{prefix}tokens"] == len(nats)
        expected = math.exp(sum(nats) / len(nats))
        assert metrics["after"][f"{prefix}perplexity"] == pytest.approx(expected, rel=1e-3)
        low, high = metrics["intervals_95"]["after"][f"{prefix}perplexity"]
        assert low < expected < high
    assert metrics["rows"] == len(rows)


def test_a_run_that_diverges_reports_its_step_and_rows(copy):
    change(copy, "sft", learning_rate=1.0e30)
    process = copy.snakemake("output/sft/tiny", "--cores", "1")
    assert process.returncode == 1
    assert "Traceback" not in process.stdout
    [line] = {line for line in process.stdout.splitlines() if line.startswith("error: ")}
    assert line.startswith("error: step 2, rows [")
    assert line.endswith("loss is nan, training has diverged: try a lower learning rate")


def test_two_processes_train_like_one(copy):
    stage = "dpo"
    spec = copy.folder / "spec.json"
    spec.write_text(json.dumps(copy.spec_of(f"output/{stage}/tiny")))
    before = lines_of(copy, f"output/{stage}/tiny")
    manifest = (copy.folder / f"output/{stage}/tiny.manifest.json").read_text()
    (copy.folder / f"output/{stage}/tiny/manifest.json").unlink()
    job = copy.run(
        *("python", "scripts/launch.py", "--standalone", "--nproc-per-node", "2"),
        *(f"scripts/train_{stage}.py", "--spec", str(spec)),
        *("--placement", json.dumps({"micro_batch_tokens": 300, "nodes": 2, "zero_stage": 3})),
    )
    assert job.returncode == 0, job.stdout
    together = lines_of(copy, f"output/{stage}/tiny")
    assert [line.keys() for line in together] == [line.keys() for line in before]
    # A tolerance for bf16: Adam's first step turns rounding errors of zero gradients into updates.
    single, distributed = (
        [line[name] for line in lines if line["step"] in (1, 2) for name in ("loss", "grad_norm")]
        for lines in (before, together)
    )
    assert distributed == pytest.approx(single, rel=0.03)
    # The placement is not part of the spec.
    again = (copy.folder / f"output/{stage}/tiny.manifest.json").read_text()
    assert json.loads(again)["spec"] == json.loads(manifest)["spec"]


@pytest.fixture
def reward_job(tokenizer, tmp_path, monkeypatch, group):
    """A function that returns a job of train_reward on a small model and random pairs."""
    inputs = {name: tmp_path / name for name in ("model", "tokens")}
    save_model(make_causal(INIT, tokenizer, seed=1), tokenizer, inputs["model"])
    inputs["tokens"].mkdir()
    random = np.random.default_rng(1)
    for split, number in (("train", 16), ("eval", 8)):
        for field, length in (("prompt", 6), ("chosen", 5), ("rejected", 7)):
            with RaggedWriter(inputs["tokens"], f"{split}.{field}", len(tokenizer)) as writer:
                writer.write(random.integers(5, len(tokenizer), (number, length)).tolist())

    def make(**settings):
        result = tmp_path / "result"
        result.mkdir()
        return SimpleNamespace(
            spec={"rule": "train_reward", "name": "tiny"},
            settings=RewardSettings(**REWARD_SETTINGS | settings),
            placement=PLACEMENT,
            options=RunOptions(save_steps=20),
            inputs=inputs,
            result=result,
            states=tmp_path / "states",
            log_folder=tmp_path / "logs",
            facts={},
            record={},
        )

    return make


def metrics_of(job):
    return [json.loads(line) for line in (job.result / "metrics.jsonl").read_text().splitlines()]


def test_the_best_reward_model_is_saved(reward_job):
    # At this rate, some later evaluation is worse than an earlier one.
    job = reward_job(
        learning_rate=0.3, epochs=6, eval_steps=2, save_strategy="best", early_stopping_patience=3
    )
    train_reward.main(job)
    evaluated = [line for line in metrics_of(job) if "eval_loss" in line]
    best = min(evaluated[1:], key=lambda line: line["eval_loss"])
    assert evaluated.index(best) == len(evaluated) - 4
    assert {"eval_accuracy", "eval_margin"} <= best.keys()
    saved = Scorer(load_scorer(job.result, "fp32", AutoTokenizer.from_pretrained(job.result)))
    pairs = Examples.read(job.inputs["tokens"], "eval", "chosen", "rejected")
    scores = torch.from_numpy(response_scores(saved.eval(), pairs, 300))
    loss = pairwise_loss(*scores).mean().item()
    assert loss == pytest.approx(best["eval_loss"], rel=1e-4)


def test_max_steps_ends_a_training_and_its_schedule(reward_job):
    job = reward_job(epochs=6, max_steps=3, lr_schedule="linear")
    train_reward.main(job)
    rates = [line["learning_rate"] for line in metrics_of(job) if line["step"]]
    assert rates == pytest.approx([0.01, 0.01 * 2 / 3, 0.01 / 3])
