"""Estimated memory and disk, by hand."""

from dataclasses import replace

import pytest

from snakechat.estimates.activation_memory import BatchShape, measure_size
from snakechat.estimates.memory import (
    Generation,
    LoadedModel,
    Workload,
    checkpoint_bytes,
    gathers_each_token,
    peak_memory,
    resident_memory,
    result_bytes,
    vllm_memory,
    weight_bytes,
)
from snakechat.workflow.placement import placement_of
from support.specs import opt_spec, small_spec

BATCH, SAMPLED = BatchShape(1, 64, 1), BatchShape(64, 512, 256)
GPU = 80 << 30


def placement(**changes):
    return placement_of({"gpus_per_node": 4, **changes})


def training(*models, frozen=(), largest=BATCH, sampled=None, **named):
    """Return the workload of training models, of which the first one may sample."""
    generations = () if sampled is None else (Generation(models[0].model, 1, sampled, **named),)
    return Workload([*models], [*frozen], largest, 0, generations=generations)


def evaluation(model, largest=BATCH, sampled=None, **named):
    """Return the workload of evaluating a model, which may sample."""
    generations = () if sampled is None else (Generation(model, 1, sampled, **named),)
    return Workload([], [model], largest, 0, generations=generations)


@pytest.mark.parametrize(
    ("stage", "offload", "weights", "training"),
    [
        (0, "none", 2, 16),
        (1, "none", 2, 4 + 12 / 4),
        (2, "none", 2, 2 + 14 / 4),
        (3, "none", 0.5, 4),
        (2, "optimizer", 2, 2),
        (3, "optimizer", 0.5, 0.5),
        (3, "parameters", 0, 0),
    ],
)
def test_resident_bytes_per_weight_with_four_processes(stage, offload, weights, training):
    # Only the adapters are trained.
    model = small_spec(lora_rank=1)
    memory = resident_memory(LoadedModel(model, stage), placement(offload=offload))
    size = measure_size(model)
    assert memory["weights"] == weights * (size.weights - size.trained)
    assert memory["training"] == training * size.trained


def test_frozen_models_are_offloaded():
    model, weights = opt_spec("opt-1.3b"), 2 * 1_315_758_080
    workload = training(LoadedModel(model, 0), frozen=[model, model])
    alone = placement(gpus_per_node=1)
    assert peak_memory(workload, alone)[1]["weights"] == 2 * weights
    offloading = replace(alone, offload_frozen=True)
    assert peak_memory(workload, offloading)[1]["weights"] < 2 * weights


@pytest.mark.parametrize("nodes", [1, 8])
def test_opt_66b_fits_on_gpus_of_80_gb(nodes):
    model = opt_spec("opt-66b", lora_rank=128)
    eight = placement(nodes=nodes, gpus_per_node=8, zero_stage=3)
    batch, sampled = BatchShape(1, 512, 256), BatchShape(8, 512, 256)
    workload = training(LoadedModel(model, 3), frozen=[model], largest=batch, sampled=sampled)
    _, memory = peak_memory(workload, eight, GPU)
    # The partitions of the model and of its reference, and a layer.
    partition = 2 * measure_size(model).weights / (8 * nodes)
    assert 1.9 * partition < memory["weights"] < 2 * partition + 3 * 10**9
    assert sum(memory.values()) < 0.9 * GPU
    assert gathers_each_token(workload, GPU)


def test_a_model_is_gathered_to_sample_if_it_takes_a_third_of_a_gpu_at_most():
    model = opt_spec("opt-13b")
    workload = training(LoadedModel(model, 3), sampled=SAMPLED)
    weights = [
        peak_memory(workload, placement(zero_stage=3), memory << 30)[1]["weights"]
        for memory in (80, 40)
    ]
    assert weights[0] == weight_bytes(model)
    assert weights[1] < 0.1 * weight_bytes(model)
    assert [gathers_each_token(workload, memory << 30) for memory in (80, 40)] == [False, True]


def test_vllm_takes_its_fraction_of_a_gpu_only_while_it_generates():
    model, partitioned = opt_spec("opt-13b"), placement(zero_stage=3)
    whole = weight_bytes(model)
    assert vllm_memory(model, GPU, 4) == {"weights": whole / 4, "cache": 0.3 * GPU - whole / 4}
    workload = training(LoadedModel(model, 3), sampled=SAMPLED, vllm_ranks=4)
    moment, memory = peak_memory(workload, partitioned, GPU)
    assert moment == "sampling"
    assert (memory["weights"], memory["cache"]) == (whole / 4, 0.3 * GPU - whole / 4)
    # A large micro-batch needs more than vLLM, which sleeps.
    large = BatchShape(64, 1024, 1)
    moment, memory = peak_memory(workload._replace(largest=large), partitioned, GPU)
    assert (moment, memory["cache"]) == ("training", 0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_evaluation_has_the_whole_model_unless_processes_partition_it(dtype):
    model = opt_spec("opt-13b", dtype=dtype)
    for whole in (placement(gpus_per_node=1, zero_stage=3), placement(zero_stage=2)):
        _, memory = peak_memory(evaluation(model), whole)
        assert memory["weights"] == weight_bytes(model)


def test_one_of_several_models_is_in_memory_at_a_time():
    small, large = opt_spec("opt-1.3b"), opt_spec("opt-6.7b")
    workload = Workload([], [small, large], BATCH, 0)
    together = peak_memory(workload, placement())[1]["weights"]
    _, memory = peak_memory(workload._replace(one_at_a_time=True), placement())
    assert together == weight_bytes(small) + weight_bytes(large)
    assert memory["weights"] == weight_bytes(large)


def test_a_saved_model_has_the_dtype_of_training_unless_another_one_is_set():
    weights = measure_size(small_spec()).weights
    # Merged weights, and adapters of 256 elements.
    adapted = training(LoadedModel(small_spec(lora_rank=1), 3))
    assert result_bytes(adapted, None) == 2 * weights + 2 * 256
    assert checkpoint_bytes(adapted) == 12 * 256
    whole = training(LoadedModel(small_spec(dtype="fp32"), 0))
    assert result_bytes(whole, None) == 4 * weights
    assert result_bytes(whole._replace(ema=True), "bf16") == 2 * 2 * weights
