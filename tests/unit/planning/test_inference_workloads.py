"""Workloads of jobs that sample and evaluate, by hand."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from snakechat.planning.activation_memory import POLICY, ModelSpec
from snakechat.planning.compute_time import GPUS, generation_seconds
from snakechat.planning.hub_catalog import MODEL_CONFIGS
from snakechat.planning.inference_workloads import compute_teacher
from snakechat.planning.job_estimate import JobEstimate
from snakechat.planning.job_sizes import JobSizes
from snakechat.planning.memory import weight_bytes
from snakechat.planning.plan import Plan, PlannedJob
from snakechat.planning.token_counts import TokenCounts
from snakechat.workflow.digests import file_digest
from snakechat.workflow.run_options import RunOptions
from support.specs import ONE_GPU

H100 = GPUS["h100"]
SAMPLED = {"max_response_length": 64, "num_generations": 2, "generation_backend": "hf"}


def estimate(rule, settings, inputs=("model",), files=(), folder=None, model="1.3b", **placement):
    """Return the estimate of a job whose inputs are trained models of OPT.

    files: Paths in the folder, which the job reads.
    """
    specs = {"base": {"rule": "fetch_model", "settings": {"hub": f"facebook/opt-{model}"}}}
    specs["trained"] = {"rule": "train_sft", "settings": {}, "inputs": {"model": {"path": "base"}}}
    specs["tokens"] = {"rule": "tokenize_rlhf", "inputs": {}}
    specs["tokens"]["settings"] = {"datasets": [], "max_prompt_length": 100}
    entries = {name: {"path": "tokens" if name == "tokens" else "trained"} for name in inputs}
    digests = {name: file_digest(folder / name) for name in files}
    specs["job"] = {"rule": rule, "settings": {"dtype": "bf16", **settings}, "inputs": entries}
    specs["job"]["files"] = digests
    placement, options = replace(ONE_GPU, **placement), RunOptions(source=str(folder))
    plan = {
        path: PlannedJob({"name": "a", "path": path, **spec}, placement, options)
        for path, spec in specs.items()
    }
    return JobEstimate("job", Plan(plan, set(plan)), H100)


def prompt_sets(folder, name, entries):
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump(entries))


def test_responses_to_prompt_sets(tmp_path):
    prompt_sets(tmp_path, "prompts/mine.yaml", ["a" * 300, "b" * 30])
    settings = {"prompt_sets": ["mine"], "max_response_length": 100}
    job = estimate("prompt_eval", settings, ("base", "sft"), ["prompts/mine.yaml"], folder=tmp_path)
    workload = job.workload
    assert job.warnings == []
    # 300 bytes are 100 tokens. One model is in memory at a time.
    assert (workload.generation.length, workload.generation.sequences) == (200, 2)
    assert job.memory["weights"] == weight_bytes(workload.frozen[0])
    # Greedy and sampled responses in a batch each.
    seconds = 2 * generation_seconds(workload.frozen[0], 2, workload.generation, H100, 1)
    compute = workload.flops / H100.flops / 0.4
    assert job.seconds == pytest.approx(2 * seconds + compute)


def test_an_evaluation_compares_all_models_of_a_recipe():
    settings = {**SAMPLED, "num_prompts": 10, "reward": [], "judge": []}
    seconds, flops = {}, {}
    for number, models in enumerate(
        (("sft", "rlhf"), ("base", "sft", "compare_with.dpo/a", "rlhf")), 1
    ):
        job = estimate("evaluate_rlhf", settings, (*models, "tokens"))
        seconds[number], flops[number] = job.seconds, job.flops
    # Each one evaluates its own responses, and the first one those of all.
    assert flops[2] == pytest.approx(2 * flops[1])
    assert seconds[2] == pytest.approx(2 * seconds[1])


@pytest.mark.parametrize(
    ("model", "gpus", "ranks", "suggestion"),
    [
        ("1.3b", 8, 1, None),
        ("30b", 8, 1, "vllm_tensor_parallel_size: 4"),
        ("30b", 8, 4, None),
        ("66b", 2, 2, "no placement helps"),
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
        assert f" and uses 30% of a GPU, 24.0 GiB; {suggestion}" in warning.replace(
            "fits with ", ""
        )


@pytest.mark.parametrize(
    ("num_responses", "model", "sequences"),
    # Two engines share the responses.
    [(10_000, "30b", 191), (10_000, "1.3b", 256), (200, "30b", 100)],
)
def test_vllm_samples_as_many_responses_as_its_cache_has_space_for(num_responses, model, sequences):
    spec = {"rule": "generate_responses", "settings": {"generation_backend": "vllm"}, "inputs": {}}
    placement = replace(ONE_GPU, gpus_per_node=8, vllm_tensor_parallel_size=4)
    job = JobSizes(spec, placement, Plan({}, set()), H100.memory)
    config = json.dumps(MODEL_CONFIGS[f"facebook/opt-{model}"])
    prompts = TokenCounts(100, 100, 0, 100, [])
    model = ModelSpec(config, POLICY, "bf16")
    shape = job.generation_batch(model, prompts, 64, num_responses)
    assert (shape.sequences, shape.length, shape.targets) == (sequences, 164, 64)
    # 30 % of the memory of 4 GPUs without the weights; 164 tokens, 48 layers of 7168 elements.
    space = 4 * 0.3 * 80 * 2**30 - 2 * 29_974_540_288
    assert int(space / (2 * 2 * 48 * 7168 * 164)) == 191
    generation = job.generation(model, num_responses, shape)
    assert (generation.is_captured, generation.num_ranks) == (True, 4)


@pytest.mark.parametrize(
    ("model", "train_on", "expected"),
    [
        ("facebook/opt-1.3b", "response", 100 * 10 * 8 * (4 + 2)),
        ("facebook/opt-1.3b", "all_tokens", 100 * 30 * 8 * (4 + 2)),
        ("bigscience/bloom-1b1", "all_tokens", 100 * 30 * 8 * (4 + 4)),
    ],
)
def test_the_files_of_a_teacher(model, train_on, expected):
    job = SimpleNamespace(
        tokens=lambda split: TokenCounts(100, 20, 10, 50, []),
        model=lambda *_: ModelSpec(json.dumps(MODEL_CONFIGS[model]), POLICY, "bf16"),
        micro_batch=lambda *_: None,
        settings={"train_on": train_on, "teacher_top_k": 8},
    )
    assert compute_teacher(job).result_bytes(None) == expected


EVALUATION = {**SAMPLED, "num_prompts": 10, "reward": [], "judge": []}


NO_GRAPHS = "assumed: without CUDA graphs, each layer takes 1 ms to sample a token"


@pytest.mark.parametrize(
    ("placement", "is_captured"),
    [
        ({}, True),
        ({"cuda_graphs": True}, True),
        ({"cuda_graphs": False}, False),
        # The whole weights have 2.5 of 80 GiB.
        ({"gpus_per_node": 8, "zero_stage": 3}, True),
    ],
)
def test_cuda_graphs_sample_by_default(placement, is_captured):
    job = estimate("evaluate_rlhf", EVALUATION, ("sft", "rlhf", "tokens"), **placement)
    generation = job.workload.generations[0]
    assert (generation.is_captured, generation.num_ranks) == (is_captured, 1)
    assert (NO_GRAPHS in job.notes) == (not is_captured)
    # 24 layers of 1 ms; with a graph, 2.5 GiB and the cache of 20 responses are read.
    per_token = generation.seconds(H100, job.num_gpus) / 64
    assert per_token == pytest.approx(0.0022 if is_captured else 0.024, rel=0.1)
