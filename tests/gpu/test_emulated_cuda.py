"""CUDA tensors that a CPU computes (emulated_cuda.py): all trainers and measurements.

The trainings run with deterministic kernels, in several micro-batches a step.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from conftest import ROOT
from gpu.emulated_runs import CASES, STEPS
from gpu.workloads import ON_PROMPTS

pytestmark = pytest.mark.slow

HERE = ROOT / "tests/gpu"

# Waits of an optimizer step: the gradient norm of each engine, and the metrics of each update.
# Those of ZeRO 2 are DeepSpeed's.
WAITS_OF_STEP = {"sft": 2, "reward": 2, "dpo": 2, "ppo": 4, "grpo": 2, "gsm8k": 2}
WAITS_OF_STEP |= {"not captured": 2, "zero 2": 6}
TOKENS = ON_PROMPTS["max_response_length"]


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The folder of emulated_runs.py, and the values that it prints as JSON."""
    if not shutil.which("g++"):
        pytest.skip("needs g++, to compile cuda_guard.cpp")
    if torch.version.cuda:
        pytest.skip("needs a torch without CUDA, which has no guard of its own")
    # It imports setuptools.
    from torch.utils.cpp_extension import include_paths

    folder = tmp_path_factory.mktemp("emulated")
    guard, libraries = folder / "libguard.so", f"{Path(torch.__file__).parent}/lib"
    command = ["g++", "-shared", "-fPIC", "-std=c++20", "-w", "cuda_guard.cpp"]
    command += [f"-I{path}" for path in include_paths()]
    command += [f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    subprocess.run([*command, "-o", str(guard)], cwd=HERE, check=True)
    paths = os.pathsep.join(str(ROOT / name) for name in ("tests", "scripts"))
    environment = {"LD_PRELOAD": str(guard), "DS_ACCELERATOR": "cuda", "PYTHONPATH": paths}
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "emulated_runs.py", str(folder)],
        cwd=HERE,
        env={**os.environ, **environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr[-5000:]
    lines = process.stdout.splitlines()
    return folder, [json.loads(line) for line in lines if line.startswith("{")]


@pytest.fixture(scope="module")
def results(output):
    """The result of each case."""
    return output[1][1]


def waits(result, phase):
    """Return the waits of a phase by kind and place."""
    return Counter(
        {(kind, place): count for of, kind, place, count in result["waits"] if of == phase}
    )


@pytest.mark.parametrize("name", CASES)
def test_a_training_runs_on_one_device_and_the_host_waits_for_no_micro_batch(name, results):
    assert results[name]["error"] is None, results[name]["error"]
    assert waits(results[name], "train").total() == WAITS_OF_STEP[name] * STEPS


@pytest.mark.parametrize("name", ["ppo", "grpo", "not captured"])
def test_sampling_waits_once_for_eight_tokens(name, results):
    found = waits(results[name], "generate")
    checks = sum(
        count for (kind, place), count in found.items() if kind == "tolist" and "decoding" in place
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


def test_a_decoder_and_its_graphs_serve_all_steps_after_the_first(results):
    # The peak of the first step says that there is memory for them.
    for name in ("ppo", "grpo", "gsm8k"):
        assert results[name]["decoders"] == 2


def test_families_whose_passes_wait_are_not_captured(output):
    found = output[1][0]
    problem = "takes no mask of four dimensions, or drops tokens"
    without_mask = ("gptj", "bloom", "mistral, window", "gemma3_text", "mamba")
    assert {name: problem for name, problem in found.items() if problem} == {
        "falcon": "called a synchronizing CUDA operation: index on the host",
        "llama, dynamic": "called a synchronizing CUDA operation: aten::_local_scalar_dense",
        **dict.fromkeys(without_mask, problem),
    }


def test_all_measurements_of_a_gpu_run(output):
    lines = {}
    for line in map(json.loads, (output[0] / "out.jsonl").read_text().splitlines()):
        lines.setdefault(line.pop("section"), []).append(line)
    assert [*lines] == ["versions", "decoding", "sft", "ppo", "grpo", "vllm", "trainers"]
    *compared, rounded, first, second = lines["trainers"]
    assert len(compared) == 2
    for training in compared:
        assert training["steps"] == 3 and training["largest_difference"] < 1e-3, training
    assert rounded["largest_difference"] < 0.02
    assert first["is_same"] and second["is_same"]
    for case in [*lines["decoding"], *lines["sft"]]:
        assert case["tokens_per_second"] > 0
    for [case] in (lines["ppo"], lines["grpo"]):
        assert all(case[name] > 0 for name in ("generate", "score", "train"))
    assert [*lines["grpo"][0]["gib_after_steps"]] == ["1", "2"]
