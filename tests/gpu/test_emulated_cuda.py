"""CUDA tensors that a CPU computes (emulated_cuda.py): all trainers, measurements, memory.

The trainings run with deterministic kernels, in several micro-batches a step.
"""

import json
from collections import Counter

import pytest

from gpu.emulated_trainings import CASES, STEPS
from gpu.workloads import ON_PROMPTS

pytestmark = pytest.mark.slow

# Waits of an optimizer step: the gradient norm of each engine, and the metrics of each update.
# Those of ZeRO 2 are DeepSpeed's.
WAITS_OF_STEP = {"sft": 2, "reward": 2, "dpo": 2, "ppo": 4, "grpo": 2, "gsm8k": 2}
WAITS_OF_STEP |= {"not captured": 2, "zero 2": 6}
TOKENS = ON_PROMPTS["max_response_length"]


# All sections of measure.py, and the other programs, in one process, which imports torch once.
PROGRAM = """
import gc
import sys
from pathlib import Path

from gpu import emulated_families, emulated_trainings, measure
from gpu.emulated_cuda import rehearsal

# Of what the imports made, passes of the collector would take minutes.
gc.freeze()
folder, trainings = Path(sys.argv[1]), Path(sys.argv[1], "trainings")
trainings.mkdir()
emulated_families.main()
# The others run in emulated_trainings.py.
measure.TINY_CASES = ("sft", "ppo", "grpo")
for name, (section, _) in measure.SECTIONS.items():
    with rehearsal():
        section(measure.Bench(name, folder / "out.jsonl", folder, measure.REHEARSAL))
emulated_trainings.main(trainings)
"""


@pytest.fixture(scope="module")
def output(emulated, tmp_path_factory):
    """The folder of the process, and the values that the programs print as JSON."""
    folder = tmp_path_factory.mktemp("emulated")
    lines = emulated("-c", PROGRAM, folder).splitlines()
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
    assert len(found) >= 30
    without_mask = ("gptj", "gpt_neo", "bloom", "mpt", "mistral, window", "gemma2", "gemma3_text")
    waiting = {
        "falcon": "called a synchronizing CUDA operation: index on the host",
        "llama, dynamic": "called a synchronizing CUDA operation: aten::_local_scalar_dense",
    }
    problem = "takes no mask of four dimensions, or drops tokens"
    expected = waiting | dict.fromkeys((*without_mask, "mamba"), problem)
    assert {name: problem for name, problem in found.items() if problem} == expected


def test_all_measurements_of_a_gpu_run(output):
    lines = {}
    for line in map(json.loads, (output[0] / "out.jsonl").read_text().splitlines()):
        lines.setdefault(line.pop("section"), []).append(line)
    assert [*lines] == ["versions", "decoding", "sft", "ppo", "grpo", "vllm", "trainers"]
    *compared, rounded, first, second = lines["trainers"]
    assert len(compared) == 3
    for training in compared:
        assert training["steps"] == 3 and training["largest_difference"] < 1e-3, training
    assert rounded["largest_difference"] < 0.02
    assert first["is_same"] and second["is_same"]
    for case in [*lines["decoding"], *lines["sft"]]:
        assert case["tokens_per_second"] > 0
    for [case] in (lines["ppo"], lines["grpo"]):
        assert all(case[name] > 0 for name in ("generate", "score", "train"))
    assert [*lines["grpo"][0]["gib_after_steps"]] == ["1", "2"]


def test_a_peak_at_real_size_is_the_estimate(emulated):
    output = emulated("simulated_memory.py", accelerator="cpu")
    for name, case in json.loads(output.splitlines()[-1]).items():
        assert case["peak"] == pytest.approx(case["estimate"], rel=0.005), name
