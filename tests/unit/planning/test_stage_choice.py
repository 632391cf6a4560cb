"""The ZeRO stage and checkpointing that a training takes where its placement has `auto`."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from snakechat.data.ragged_arrays import RaggedWriter
from snakechat.jobs.plan import Plan, PlannedJob
from snakechat.planning import stage_choice
from snakechat.planning.memory import GIB
from snakechat.planning.stage_choice import (
    CHOICES,
    choose_stage,
    determine_stage,
    is_worth_compiling,
    possible_choices,
)
from support.specs import ONE_GPU

pytestmark = pytest.mark.usefixtures("opt_hub")

SETTINGS = {"dtype": "bf16", "lora_rank": 0, "train_base": "none", "epochs": 1, "max_steps": None}
SETTINGS |= {"global_batch_size": 8}
OPEN = {"zero_stage": "auto", "activation_checkpointing": "auto"}
NODE = replace(ONE_GPU, **OPEN, gpus_per_node=8, micro_batch_tokens=4096)


def sft_spec(rule="train_sft", **settings):
    inputs = {
        "model": {"rule": "fetch_model", "path": "model"},
        "tokens": {"rule": "tokenize_sft", "path": "tokens"},
    }
    return {"rule": rule, "settings": SETTINGS | settings, "inputs": inputs}


def determine(gpu_memory, placement=NODE, model="6.7b", **settings):
    """Return the choice for SFT of an OPT model whose rows have up to 512 tokens."""
    tokens = {"rule": "tokenize_sft", "name": "a", "inputs": {}}
    tokens["settings"] = {"max_length": 512, "datasets": []}
    hub = {"rule": "fetch_model", "settings": {"hub": f"facebook/opt-{model}", "revision": "main"}}
    jobs = {"model": PlannedJob(hub), "tokens": PlannedJob(tokens)}
    chosen, reason = determine_stage(
        sft_spec(**settings), placement, Plan(jobs, set()), gpu_memory * GIB
    )
    return tuple(chosen.values()), reason


# --- what fits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "lora_rank", "gpu_memory", "chosen"),
    [
        # 6.66 B weights take 18 bytes each: 112 GiB, and activations.
        ("6.7b", 0, 141, (0, False)),
        # Eight processes divide 16 of the 18 bytes.
        ("6.7b", 0, 80, (2, False)),
        # With adapters, there is little to divide: the weights themselves have 56 GiB.
        ("30b", 128, 80, (0, True)),
        ("6.7b", 0, 24, (3, True)),
        # Weights of 122 GiB are divided; there is space for activations of 55 GiB.
        ("66b", 128, 141, (3, False)),
    ],
)
def test_the_first_choice_that_fits_is_taken(model, lora_rank, gpu_memory, chosen):
    found, reason = determine(gpu_memory, model=model, lora_rank=lora_rank)
    assert found == (*chosen, 4096) and "fit" not in reason


def test_if_nothing_fits_the_last_choice_is_taken():
    found, reason = determine(10)
    assert found == (3, True, 4096)
    assert reason.startswith(
        "zero_stage: 3 with activation_checkpointing, micro_batch_tokens: 4096: does not fit, "
    )


@pytest.mark.parametrize(
    ("model", "gpus", "gpu_memory", "chosen"),
    [
        # Larger micro-batches need at most 70 % of the memory.
        ("1.3b", 1, 80, (0, False, 16384)),
        ("1.3b", 1, 40, (0, False, 8192)),
        # Smaller ones come before checkpointing, and checkpointing before stage 3.
        ("6.7b", 8, 40, (2, False, 2048)),
        ("6.7b", 8, 24, (3, True, 8192)),
    ],
)
def test_micro_batches_follow_the_memory(model, gpus, gpu_memory, chosen):
    placement = replace(NODE, micro_batch_tokens="auto", gpus_per_node=gpus)
    assert determine(gpu_memory, placement, model)[0] == chosen


# --- what a placement allows --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "changes", "stages"),
    [
        # Stages that the dtype does not support are skipped.
        ("bf16", {}, [0, 2, 3]),
        ("fp16", {}, [2, 3]),
        ("bf16", {"offload": "optimizer"}, [2, 3]),
        ("bf16", {"gpus_per_node": 1}, [0]),
        ("bf16", {"zero_stage": 1}, [1]),
    ],
)
def test_stages_that_a_placement_allows(dtype, changes, stages):
    choices = possible_choices(replace(NODE, **changes), dtype)
    assert sorted({stage for stage, _ in choices}) == stages
    assert len(choices) == 2 * len(stages)
    assert choices == [choice for choice in CHOICES if choice in choices]


def test_a_cpu_and_jobs_that_train_no_model_have_no_choice():
    plan = Plan({}, set())
    assert determine_stage(sft_spec("evaluate_sft"), NODE, plan, 80 * GIB) == ({}, "")
    assert determine(0, replace(NODE, gpus_per_node=0)) == ((0, False, 4096), "")
    assert determine(0, replace(NODE, gpus_per_node=0, zero_stage=2)) == ((2, False, 4096), "")


# --- in a training program ----------------------------------------------------------------------


@pytest.fixture
def make_job(tmp_path, monkeypatch):
    """A function that makes a job with an existing model and tokens, on a GPU of a size."""
    config = {"model_type": "gpt2", "n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 500}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"n_positions": 512}))
    (tmp_path / "tokens").mkdir()
    for field in ("prompt", "chosen"):
        with RaggedWriter(tmp_path / "tokens", f"train.{field}", 500) as writer:
            writer.write([[1] * 200])

    def make(gpu_memory, **placement):
        monkeypatch.setattr(stage_choice.torch.cuda, "mem_get_info", lambda: (0, gpu_memory))
        spec = sft_spec()
        for entry in spec["inputs"].values():
            entry["path"] = str(tmp_path / entry["path"])
        return SimpleNamespace(
            spec=spec,
            placement=replace(ONE_GPU, **OPEN | placement),
            states=tmp_path / "states",
        )

    return make


@pytest.mark.parametrize("gpu_memory, recomputes", [(GIB, False), (GIB // 4, True)])
def test_a_program_chooses_for_the_memory_of_its_gpu(gpu_memory, recomputes, make_job, capsys):
    job = make_job(gpu_memory)
    choose_stage(job)
    assert job.placement == replace(ONE_GPU, activation_checkpointing=recomputes)
    [line] = capsys.readouterr().out.splitlines()
    word = "with" if recomputes else "without"
    start = f"zero_stage: 0 {word} activation_checkpointing, micro_batch_tokens: 8192: 0."
    assert line.startswith(start)
    assert line.endswith(f" of {gpu_memory / GIB:.1f} GiB") and "fit" not in line


def test_a_run_that_resumes_keeps_its_stage(make_job):
    job = make_job(8 * GIB, gpus_per_node=8)
    for step, stage in ((9, 2), (10, 3)):
        values = {"evaluations.best": 1, "actor.zero_stage": stage, "critic.zero_stage": 0}
        folder = job.states / f"{step:08}/0-of-1"
        folder.mkdir(parents=True)
        (folder / "values.json").write_text(json.dumps({"step": step, **values}))
    # A damaged state is ignored.
    (job.states / "00000011").mkdir()
    choose_stage(job)
    assert (job.placement.zero_stage, job.placement.activation_checkpointing) == (3, False)


def test_all_processes_take_the_choice_of_the_first_one(make_job, monkeypatch, capsys):
    job = make_job(GIB)
    monkeypatch.setattr(stage_choice, "rank", lambda: 1)
    first = iter([CHOICES.index((2, True)), 4096, False])
    monkeypatch.setattr(stage_choice, "broadcast_from_first", lambda _: next(first))
    choose_stage(job)
    chosen = {"zero_stage": 2, "activation_checkpointing": True, "micro_batch_tokens": 4096}
    assert job.placement == replace(ONE_GPU, **chosen)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("weights", "flops", "stage", "is_worth"),
    [
        # 40 % of 1e15 operations per second for 600 seconds.
        (1e9, 2.5e17, 0, True),
        (1e9, 2.3e17, 0, False),
        (1e9, math.nan, 0, False),
        (1e9, 2.5e17, 3, False),
        # Its comparison with transformers is in fp32.
        (5e8, 2.5e17, 0, False),
    ],
)
def test_long_trainings_of_large_models_are_compiled(weights, flops, stage, is_worth, monkeypatch):
    monkeypatch.setattr(stage_choice, "measure_size", lambda _: SimpleNamespace(weights=weights))
    trained = SimpleNamespace(stage=stage, model=None)
    workload = SimpleNamespace(trained=[trained], flops=flops)
    assert is_worth_compiling(workload, 1e15) == is_worth


# --- compilation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "deterministic", "expected"),
    [({}, False, True), ({"compile": False}, False, False), ({}, True, None)],
)
def test_a_program_compiles_unless_its_placement_or_spec_forbids_it(
    placement, deterministic, expected, make_job, monkeypatch, capsys
):
    applied = []
    monkeypatch.setattr(stage_choice, "can_compile", lambda: True)
    monkeypatch.setattr(stage_choice, "is_worth_compiling", lambda *_: True)
    monkeypatch.setattr(stage_choice, "choose_device", applied.append)
    monkeypatch.setattr(stage_choice.torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    job = make_job(GIB, **placement)
    job.spec["deterministic"] = deterministic
    choose_stage(job)
    assert job.placement.compile is expected
    assert applied == ([job.placement] if expected else [])
    assert ("compile: true" in capsys.readouterr().out) == bool(expected)
