"""Workloads of jobs, by hand."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from snakechat.planning.activation_memory import POLICY, ModelSpec
from snakechat.planning.compute_time import GPUS
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
EVALUATION = {**SAMPLED, "num_prompts": 10, "reward": [], "judge": []}


def estimate(rule, settings, inputs, model="1.3b", **placement):
    """Return the estimate of a job on trained models of OPT; its teacher is OPT-6.7B."""
    hub = {"hub": f"facebook/opt-{model}", "revision": "main"}
    specs = {"base": {"rule": "fetch_model", "settings": hub}}
    teacher = hub | {"hub": "facebook/opt-6.7b"}
    specs["teacher"] = {"rule": "fetch_model", "settings": teacher}
    specs["trained"] = {"rule": "train_sft", "settings": {}, "inputs": {"model": {"path": "base"}}}
    # A dataset whose number of rows is unknown.
    specs["records"] = {"rule": "import_dataset", "settings": {"hub": "someone/something"}}
    specs["rows"] = {"rule": "split_dataset", "settings": {"weights": {"rlhf": 1}}}
    read = {"records.a": {"path": "records"}, "rows.a": {"path": "rows"}}
    specs["tokens"] = {"rule": "tokenize_rlhf", "inputs": read}
    specs["tokens"]["settings"] = {"datasets": [["a", 1]], "max_prompt_length": 100}
    entries = {name: {"path": name if name in specs else "trained"} for name in inputs}
    specs["job"] = {"rule": rule, "settings": {"dtype": "bf16", **settings}, "inputs": entries}
    jobs = {
        path: PlannedJob({"name": "a", "path": path, **spec}, replace(ONE_GPU, **placement))
        for path, spec in specs.items()
    }
    return JobEstimate("job", Plan(jobs, set(jobs)), H100)


def test_an_evaluation_compares_all_models_of_a_recipe():
    two = estimate("evaluate_rlhf", EVALUATION, ("sft", "rlhf", "tokens"))
    four = ("base", "sft", "compare_with.dpo/a", "rlhf", "tokens")
    four = estimate("evaluate_rlhf", EVALUATION, four)
    # Each one evaluates its own responses, and the first one those of all.
    assert four.workload.flops == pytest.approx(2 * two.workload.flops)
    assert four.seconds == pytest.approx(2 * two.seconds)


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


@pytest.mark.parametrize("lora_rank", [0, 128])
def test_a_teacher_is_in_memory_with_its_own_size(lora_rank):
    recipe = {"actor": "sft/1.3b", "lora_rank": lora_rank, "lora_alpha": 1}
    recipe |= {"algorithm": "distill", "teacher": "models/opt-6.7b"}
    settings = load({"rlhf": {"recipes": {"mine": recipe}}}).program_settings("rlhf", "mine")
    workload = estimate("train_rlhf", settings, ("actor", "teacher", "tokens")).workload
    [actor], [teacher] = workload.trained, workload.frozen
    assert '"hidden_size": 2048' in actor.model.config
    assert '"hidden_size": 4096' in teacher.config
