"""The ladder of placements that `auto` stands for."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from snakechat.training import trainer
from snakechat.training.rungs import (
    REPRODUCED,
    Ladder,
    Rung,
    possible_rungs,
    reproduced_rung,
    without_hopeless,
)
from snakechat.workflow.errors import is_out_of_memory
from snakechat.workflow.manifest import sealed_json
from support.specs import ONE_GPU

OPEN = {"zero_stage": "auto", "activation_checkpointing": "auto", "micro_batch_tokens": "auto"}
NODE = replace(ONE_GPU, **OPEN, gpus_per_node=8)
GIB = 1 << 30


def test_smaller_micro_batches_come_before_checkpointing_and_stage_3_comes_last():
    rungs = possible_rungs(NODE, "bf16")
    stages = [rung[:2] for rung in rungs[::3]]
    assert stages == [(0, False), (2, False), (0, True), (2, True), (3, False), (3, True)]
    assert [rung.micro_batch_tokens for rung in rungs] == [8192, 4096, 2048] * 6


@pytest.mark.parametrize(
    ("changes", "dtype", "stages"),
    [
        ({}, "bf16", [0, 2, 3]),
        ({}, "fp32", [0, 1, 2, 3]),
        ({}, "fp16", [2, 3]),
        ({"zero_stage": 1}, "fp32", [1]),
        ({"offload": "optimizer"}, "fp32", [1, 2, 3]),
        ({"compile": True}, "bf16", [0, 2]),
        # There is nothing to partition.
        ({"gpus_per_node": 1}, "bf16", [0]),
        # A CPU takes the first rung.
        ({"gpus_per_node": 0}, "bf16", [0]),
        ({"activation_checkpointing": True, "micro_batch_tokens": 1000}, "bf16", [0, 2, 3]),
    ],
)
def test_a_placement_allows_some_rungs(changes, dtype, stages):
    rungs = possible_rungs(replace(NODE, **changes), dtype)
    assert sorted({rung.zero_stage for rung in rungs}) == stages
    # Keys that are given stay.
    for key in changes.keys() & Rung._fields:
        assert {getattr(rung, key) for rung in rungs} == {changes[key]}


def test_rungs_without_memory_for_16_bytes_of_each_weight_are_skipped():
    rungs = possible_rungs(NODE, "bf16")

    def first(weights, **changes):
        return without_hopeless(rungs, replace(NODE, **changes), weights, 80 * GIB)[0].zero_stage

    # 16 bytes of each, 2 and an eighth of 14, an eighth of 16, and more than eight GPUs have.
    assert [first(weights * 10**9) for weights in (5, 6, 22, 23, 42, 100)] == [0, 2, 2, 3, 3, 3]
    assert first(100 * 10**9, offload="optimizer") == 0
    assert without_hopeless(rungs, NODE, 100 * 10**9, 80 * GIB) == rungs[-1:]


def test_a_ladder_goes_down_and_remembers(tmp_path):
    ladder = Ladder(tmp_path, NODE, "bf16")
    assert ladder.rung == Rung(0, False, 8192) and ladder.state == "open"
    assert ladder.go_down() and ladder.go_down()
    again = Ladder(tmp_path, NODE, "bf16")
    assert (again.rung, again.number) == (Rung(0, False, 2048), 2)
    # With checkpoints of stage 0, checkpointing comes next.
    assert again.go_down(zero_stage=0)
    assert again.rung == Rung(0, True, 8192)
    # Another placement begins again, as does one with a damaged file.
    assert Ladder(tmp_path, replace(NODE, gpus_per_node=4), "bf16").number == 0
    ladder.file.write_text("{")
    again = Ladder(tmp_path, NODE, "bf16")
    assert again.rung == Rung(0, False, 8192)
    # Below the last one, there is none.
    while again.rung != again.rungs[-1]:
        assert again.go_down()
    assert not again.go_down() and not again.file.exists()


def test_a_build_takes_the_rungs_of_the_one_that_it_reproduces(tmp_path, monkeypatch):
    folder = tmp_path / "sft/mine"
    folder.mkdir(parents=True)
    record = {"spec": "", "placement": vars(Rung(2, False, 4096).of(NODE))}
    (folder / "run.json").write_text(sealed_json(record))
    rungs = possible_rungs(NODE, "bf16")
    target = Path("output/sft/mine")
    assert reproduced_rung(target, rungs) is None
    monkeypatch.setenv(REPRODUCED, str(tmp_path))
    assert reproduced_rung(target, rungs) == Rung(2, False, 4096)
    assert reproduced_rung(target, rungs[:1]) is None


@pytest.mark.parametrize(
    "message",
    [
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "NCCL error ... Failed to CUDA calloc 6291456 bytes",
        "Free memory on device (3.2/79.1 GiB) on startup is less than desired",
        "[Errno 12] Cannot allocate memory",
    ],
)
def test_errors_of_libraries_without_memory_are_known(message):
    error = ValueError("the step failed")
    error.__cause__ = RuntimeError(message)
    assert is_out_of_memory(error) and is_out_of_memory(error.__cause__)
    assert not is_out_of_memory(ValueError("memory"))


# The layers, and then whether the process chooses for compiled ones.
@pytest.mark.parametrize(("steps_left", "compiled"), [(101, ["layers", True]), (100, [])])
def test_layers_are_compiled_if_the_steps_left_take_long(steps_left, compiled, monkeypatch):
    found, job = [], SimpleNamespace(placement=NODE, spec={})
    monkeypatch.setattr(trainer, "can_compile", lambda: True)
    monkeypatch.setattr(trainer, "choose_device", lambda placement: found.append(placement.compile))
    monkeypatch.setattr(trainer, "compile_layers", found.append)
    monkeypatch.setattr(trainer, "model_size", lambda _: {"weights": 1e9})
    engine = SimpleNamespace(stage=2, module=SimpleNamespace(model="layers"))
    training = SimpleNamespace(job=job, timer=SimpleNamespace(seconds={"train": 5, "sample": 1}))
    trainer.Training._compile(training, [engine], steps_left)
    assert found == compiled
