"""All trainers on CUDA tensors that a CPU computes (emulated_cuda.py): devices, kernels, waits.

The trainings run with deterministic kernels, in several micro-batches a step.
"""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from conftest import ROOT
from gpu.emulated_trainings import CASES, STEPS
from gpu.workloads import ON_PROMPTS

pytestmark = pytest.mark.slow

HERE = ROOT / "tests/gpu"
# Waits of an optimizer step: the gradient norm of each engine, and the metrics of each update.
# Those of ZeRO 2 are DeepSpeed's.
WAITS_OF_STEP = {"sft": 1, "reward": 1, "dpo": 1, "ppo": 4, "grpo": 2, "gsm8k": 2}
WAITS_OF_STEP |= {"not captured": 2, "zero 2": 5}
TOKENS = ON_PROMPTS["max_response_length"]


@pytest.fixture(scope="module")
def results(guard, tmp_path_factory):
    """The result of each case, from one process."""
    folder = tmp_path_factory.mktemp("emulated")
    command = [sys.executable, HERE / "emulated_trainings.py", guard, folder, *CASES]
    environment = {**os.environ, "DS_ACCELERATOR": "cuda", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, timeout=900
    )
    assert process.returncode == 0, process.stderr[-5000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in CASES}


def waits(result, phase):
    """Return the waits of a phase by kind and place."""
    return Counter(
        {(kind, place): count for of, kind, place, count in result["waits"] if of == phase}
    )


@pytest.mark.parametrize("name", CASES)
def test_a_training_runs_on_one_device_with_deterministic_kernels(name, results):
    assert results[name]["error"] is None, results[name]["error"]


@pytest.mark.parametrize("name", CASES)
def test_the_host_waits_for_a_step_and_for_no_micro_batch(name, results):
    assert waits(results[name], "train").total() == WAITS_OF_STEP[name] * STEPS


@pytest.mark.parametrize("name", ["sft", "reward", "dpo"])
def test_the_metrics_of_a_step_are_read_at_once(name, results):
    others = waits(results[name], "").items()
    assert sum(count for (_, place), count in others if place.startswith("train_")) == STEPS


@pytest.mark.parametrize("name", ["ppo", "grpo", "not captured"])
def test_sampling_waits_once_for_eight_tokens(name, results):
    found = waits(results[name], "generate")
    checks = sum(
        count
        for (kind, place), count in found.items()
        if kind == "tolist" and "fixed_decoding" in place
    )
    # After the first token, and after each eighth one.
    assert 0 < checks <= (1 + TOKENS // 8) * STEPS
    # Two in the pass of the prompts, one for the responses, and one when rows leave the batch.
    assert found.total() <= (2 * (1 + TOKENS // 8) + 3) * STEPS


def test_a_captured_step_of_decoding_does_not_wait(results):
    # Each step samples a token of all responses.
    for name in ("ppo", "grpo"):
        assert results[name]["captured_steps"] >= STEPS * (TOKENS - 1) // 2
        assert not waits(results[name], "captured")
    assert not results["not captured"]["captured_steps"]
