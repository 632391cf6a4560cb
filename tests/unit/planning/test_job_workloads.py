"""Workloads of jobs, by hand."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from snakechat.planning.activation_memory import POLICY, ModelSpec
from snakechat.planning.compute_time import GPUS, generation_seconds
from snakechat.planning.job_estimate import JobEstimate
from snakechat.planning.job_sizes import JobSizes
from snakechat.planning.job_workloads import compute_teacher
from snakechat.planning.plan import Plan, PlannedJob
from snakechat.planning.token_counts import TokenCounts
from support.configs import load
from support.specs import ONE_GPU, SMALL, opt_spec

pytestmark = pytest.mark.usefixtures("opt_hub")

H100 = GPUS["h100"]
SAMPLED = {"max_response_length": 64, "num_generations": 2, "generation_backend": "hf"}


def estimate(rule, settings, inputs=("model",), model="1.3b", **placement):
    """Return the estimate of a job whose inputs are trained models of OPT."""
    hub = {"hub": f"facebook/opt-{model}", "revision": "main"}
    specs = {"base": {"rule": "fetch_model", "settings": hub}}
    specs["trained"] = {"rule": "train_sft", "settings": {}, "inputs": {"model": {"path": "base"}}}
    # A dataset whose number of rows is unknown.
    specs["records"] = {"rule": "import_dataset", "settings": {"hub": "someone/something"}}
    specs["rows"] = {"rule": "split_dataset", "settings": {"weights": {"rlhf": 1}}}
    read = {"records.a": {"path": "records"}, "rows.a": {"path": "rows"}}
    specs["tokens"] = {"rule": "tokenize_rlhf", "inputs": read}
    specs["tokens"]["settings"] = {"datasets": [["a", 1]], "max_prompt_length": 100}
    entries = {name: {"path": "tokens" if name == "tokens" else "trained"} for name in inputs}
    specs["job"] = {"rule": rule, "settings": {"dtype": "bf16", **settings}, "inputs": entries}
    return estimate_of(specs, **placement)


def estimate_of(specs, **placement):
    """Return the estimate of the last one of jobs, given by their paths."""
    jobs = {
        path: PlannedJob({"name": "a", "path": path, **spec}, replace(ONE_GPU, **placement))
        for path, spec in specs.items()
    }
    return JobEstimate("job", Plan(jobs, set(jobs)), H100)


def test_an_evaluation_compares_all_models_of_a_recipe():
    settings = {**SAMPLED, "num_prompts": 10, "reward": [], "judge": []}
    seconds, flops = {}, {}
    for number, models in enumerate(
        (("sft", "rlhf"), ("base", "sft", "compare_with.dpo/a", "rlhf")), 1
    ):
        job = estimate("evaluate_rlhf", settings, (*models, "tokens"))
        seconds[number], flops[number] = job.seconds, job.workload.flops
    # Each one evaluates its own responses, and the first one those of all.
    assert flops[2] == pytest.approx(2 * flops[1])
    assert seconds[2] == pytest.approx(2 * seconds[1])


@pytest.mark.parametrize(
    ("model", "gpus", "ranks", "suggestion"),
    [
        ("1.3b", 8, 1, None),
        ("30b", 8, 1, "vllm_tensor_parallel_size: 4"),
        ("30b", 8, 4, None),
        ("66b", 2, 2, "nothing that was tried helps"),
    ],
)
def test_vllm_has_a_fraction_of_each_gpu(model, gpus, ranks, suggestion):
    settings = {**SAMPLED, "generation_backend": "vllm"}
    placement = {"gpus_per_node": gpus, "zero_stage": 3, "vllm_tensor_parallel_size": ranks}
    job = estimate("generate_responses", settings, ("model", "tokens"), model=model, **placement)
    if suggestion is None:
        assert job.warnings == []
    else:
        [warning] = job.warnings
        assert warning.startswith("does not fit: vllm needs ")
        assert " and uses 30% of a GPU of 80.0 GiB; " in warning and suggestion in warning


@pytest.mark.parametrize(
    ("num_responses", "model", "sequences"),
    # Two engines share the responses.
    [(10_000, "30b", 191), (10_000, "1.3b", 256), (200, "30b", 100)],
)
def test_vllm_samples_as_many_responses_as_its_cache_has_space_for(num_responses, model, sequences):
    settings = {"generation_backend": "vllm", "max_response_length": 64}
    spec = {"rule": "generate_responses", "settings": settings, "inputs": {}}
    placement = replace(ONE_GPU, gpus_per_node=8, vllm_tensor_parallel_size=4)
    job = JobSizes(spec, placement, Plan({}, set()), H100.memory)
    prompts = TokenCounts(100, 100, 0, 100, [])
    generation = job.generation(opt_spec(f"opt-{model}"), prompts, num_responses)
    shape = generation.shape
    assert (shape.sequences, shape.length, shape.targets) == (sequences, 164, 64)
    assert (generation.is_captured, generation.vllm_ranks) == (True, 4)
    # 30 % of the memory of 4 GPUs without the weights; 164 tokens, 48 layers of 7168 elements.
    space = 4 * 0.3 * 80 * 2**30 - 2 * 29_974_540_288
    assert int(space / (2 * 2 * 48 * 7168 * 164)) == 191


@pytest.mark.parametrize(
    ("vocabulary", "train_on", "expected"),
    [
        (1 << 16, "response", 100 * 10 * 8 * (4 + 2)),
        (1 << 16, "all_tokens", 100 * 30 * 8 * (4 + 2)),
        ((1 << 16) + 1, "all_tokens", 100 * 30 * 8 * (4 + 4)),
    ],
)
def test_the_files_of_a_teacher(vocabulary, train_on, expected):
    job = SimpleNamespace(
        tokens=lambda: TokenCounts(100, 20, 10, 50, []),
        model=lambda *_: ModelSpec(json.dumps(SMALL | {"vocab_size": vocabulary}), POLICY, "bf16"),
        micro_batch=lambda *_: None,
        settings={"train_on": train_on, "teacher_top_k": 8},
    )
    assert compute_teacher(job).file_bytes == expected


def test_the_time_is_unknown_without_the_number_of_rows():
    job = estimate("generate_responses", SAMPLED, ("model", "tokens"))
    assert math.isnan(job.seconds) and job.memory["cache"] > 0


EVALUATION = {**SAMPLED, "num_prompts": 10, "reward": [], "judge": []}


@pytest.mark.parametrize(
    ("placement", "is_captured"),
    [
        ({}, True),
        ({"cuda_graphs": False}, False),
        # The whole weights have 2.5 of 80 GiB.
        ({"gpus_per_node": 8, "zero_stage": 3}, True),
    ],
)
def test_cuda_graphs_sample_by_default(placement, is_captured):
    job = estimate("evaluate_rlhf", EVALUATION, ("sft", "rlhf", "tokens"), **placement)
    generation = job.workload.generations[0]
    assert (generation.is_captured, generation.vllm_ranks) == (is_captured, 0)
    # 24 layers of 1 ms; with a graph, 2.5 GiB and the cache of 20 responses are read.
    per_token = generation_seconds(generation, H100, job.num_gpus) / 64
    assert per_token == pytest.approx(0.0022 if is_captured else 0.024, rel=0.1)


@pytest.mark.parametrize("lora_rank", [0, 128])
def test_a_teacher_is_in_memory_with_its_own_size(lora_rank):
    recipe = {"actor": "sft/1.3b", "lora_rank": lora_rank, "lora_alpha": 1}
    recipe |= {"algorithm": "distill", "teacher": "models/opt-6.7b"}
    config = load({"rlhf": {"recipes": {"mine": recipe}}})
    specs = {
        name: {
            "rule": "fetch_model",
            "inputs": {},
            "settings": {"hub": f"facebook/opt-{name}", "revision": "main"},
        }
        for name in ("1.3b", "6.7b")
    }
    tokens = {"datasets": [], "max_prompt_length": 256}
    specs["tokens"] = {"rule": "tokenize_rlhf", "inputs": {}, "settings": tokens}
    inputs = {"actor": "1.3b", "teacher": "6.7b", "tokens": "tokens"}
    specs["job"] = {"rule": "train_rlhf", "settings": config.program_settings("rlhf", "mine")}
    specs["job"]["inputs"] = {name: {"path": path} for name, path in inputs.items()}
    workload = estimate_of(specs).workload
    [actor], [teacher] = workload.trained, workload.frozen
    assert '"hidden_size": 2048' in actor.model.config
    assert '"hidden_size": 4096' in teacher.config
