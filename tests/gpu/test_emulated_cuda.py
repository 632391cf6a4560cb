"""CUDA tensors that a CPU computes (emulated_cuda.py): all trainers and measurements.

The trainings run with deterministic kernels, in several micro-batches a step. All run in one
process, which imports torch once:

    test_emulated_cuda.py FOLDER

It prints two lines of JSON: why a graph cannot have the pass of each model family, or null; and of
each training the waits of the host, the captured decoding steps, the decoders and the error. The
measurements of measure.py write FOLDER/out.jsonl.
"""

import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import ROOT
from gpu import measure
from gpu.emulated_cuda import DEVICE, emulation, rehearsal
from gpu.workloads import ON_PROMPTS, tiny_job, train
from snakechat.modeling import generation
from snakechat.modeling.generation import FixedDecoder, Sampler
from snakechat.training.metrics import StepTimer
from snakechat.workflow import processes
from support.families import FAMILIES, LLAMA, SIZE, WINDOWS

pytestmark = pytest.mark.slow

STEPS = 3
# Training of workloads.TINY_CASES, and changes of the placement.
CASES = {
    **{name: (name, {}) for name in ("sft", "reward", "dpo", "ppo", "grpo", "gsm8k")},
    "not captured": ("grpo", {"cuda_graphs": False}),
    "zero 2": ("sft", {"zero_stage": 2}),
}
# Waits of an optimizer step: the gradient norm of each engine, and the metrics of each update.
# Those of ZeRO 2 are DeepSpeed's.
WAITS_OF_STEP = {"sft": 2, "reward": 2, "dpo": 2, "ppo": 4, "grpo": 2, "gsm8k": 2}
WAITS_OF_STEP |= {"not captured": 2, "zero 2": 6}
HERE = ROOT / "tests/gpu"
TOKENS = ON_PROMPTS["max_response_length"]

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
CAPTURED = {
    **FAMILIES,
    **WINDOWS,
    "gptj": {**SIZE, "model_type": "gptj", "n_positions": 64, "rotary_dim": 4},
    "falcon": {**LLAMA, "model_type": "falcon"},
    "llama, dynamic": {**LLAMA, "model_type": "llama", "rope_parameters": DYNAMIC},
    "phi3, longrope": {
        **{**LLAMA, "model_type": "phi3", "rope_scaling": LONGROPE},
        "original_max_position_embeddings": 32,
    },
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4},
    "mamba": {**SIZE, "model_type": "mamba", "state_size": 8},
}


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The folder of the process, and the values that it prints as JSON."""
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
        [sys.executable, "-W", "ignore", __file__, str(folder)],
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
    without_mask = ("gptj", "bloom", *WINDOWS, "gemma3_text", "mamba")
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


# --- the process ----------------------------------------------------------------------------------


def capture_problem(keys):
    """Return why a graph cannot have the pass of a family; None if it can."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**keys, vocab_size=64, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config).eval()
    if not generation.takes_dense_mask(model):
        return "takes no mask of four dimensions, or drops tokens"
    with emulation():
        return generation._capture_problem(model.to(DEVICE))


def run_measurements(folder):
    """Run all sections of measure.py, with few of its trainings: `run_training` has the others."""
    measure.TINY_CASES = ("sft", "grpo")
    for name, (section, _) in measure.SECTIONS.items():
        with rehearsal():
            section(measure.Bench(name, folder / "out.jsonl", folder, measure.REHEARSAL))


def run_training(name, folder):
    """Run the unchanged `main` of a trainer; return what the tests check."""
    case, changes = CASES[name]
    with contextlib.ExitStack() as stack:
        counts, captured, decoders, error = stack.enter_context(emulation()), [], [], None
        for owner, attribute, value in (
            (StepTimer, "__call__", timed_phase(StepTimer.__call__, counts)),
            (FixedDecoder, "run_graph", captured_phase(counts, captured)),
            (Sampler, "fixed_decoder", recorded(Sampler.fixed_decoder, decoders)),
        ):
            stack.enter_context(mock.patch.object(owner, attribute, value))
        try:
            placement = {"gpus_per_node": 1, **changes}
            job = tiny_job(case, folder, folder / name / "result", "bf16", **placement)
            counts.waits.clear()
            train(job, STEPS)
        except Exception:
            error = traceback.format_exc()
    return {
        "error": error,
        "waits": [[*key, number] for key, number in sorted(counts.waits.items())],
        "captured_steps": len(captured),
        "decoders": len({*map(id, decoders)}),
    }


def recorded(get, decoders):
    """Return Sampler.fixed_decoder, which adds each decoder to a list."""

    def call(*arguments):
        decoders.append(get(*arguments))
        return decoders[-1]

    return call


def timed_phase(measured, counts):
    """Return StepTimer.__call__ whose sections are the phases of the counts."""

    @contextlib.contextmanager
    def section(timer, name):
        before, counts.phase = counts.phase, name
        with measured(timer, name):
            yield
        counts.phase = before

    return section


def captured_phase(counts, steps):
    """Return FixedDecoder.run_graph, whose steps are a phase of the counts and added to a list."""

    def run(decoder):
        before, counts.phase = counts.phase, "captured"
        decoder.sample()
        counts.phase = before
        steps.append(decoder.number)

    return run


def main(folder):
    # Of what the imports made, passes of the collector would take minutes.
    gc.freeze()
    gc.enable()
    warnings.simplefilter("ignore")
    print(json.dumps({name: capture_problem(keys) for name, keys in CAPTURED.items()}))
    run_measurements(folder)
    processes.request_deterministic_kernels()
    trainings = folder / "trainings"
    trainings.mkdir()
    print(json.dumps({name: run_training(name, trainings) for name in CASES}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
