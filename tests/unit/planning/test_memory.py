"""Estimated memory and disk, by hand."""

from dataclasses import replace

import pytest

from snakechat.planning.activation_memory import SCORE, BatchShape, measure_size
from snakechat.planning.memory import (
    checkpoint_bytes,
    generation_memory,
    host_memory,
    peak_memory,
    resident_memory,
    result_bytes,
    vllm_memory,
    weight_bytes,
)
from snakechat.planning.workload import Generation, LoadedModel, Workload
from snakechat.training.zero_stages import zero_buffers
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
    ("stage", "dtype", "weights", "gradients", "optimizer"),
    [
        (0, "bf16", 2, 4, 12),
        (0, "fp32", 4, 4, 8),
        (1, "fp32", 4, 4, 3),
        (2, "bf16", 2, 1, 3),
        (3, "bf16", 0.5, 1, 3),
    ],
)
def test_resident_bytes_per_weight_with_four_processes(stage, dtype, weights, gradients, optimizer):
    # Only the adapters are trained.
    model = small_spec(dtype=dtype, lora_rank=1)
    memory = resident_memory(LoadedModel(model, stage), placement())
    size = measure_size(model)
    assert memory["weights"] == weights * size.weights
    assert memory["gradients"] == gradients * size.trained
    assert memory["optimizer"] == optimizer * size.trained
    bucket = 4 * zero_buffers(3, size.weights).bucket if stage == 3 else 0
    assert memory.get("buffers", 0) == bucket


def test_offloaded_tensors_are_in_host_memory():
    model, weights = small_spec(), measure_size(small_spec()).weights
    optimizer, parameters = (placement(offload=value) for value in ("optimizer", "parameters"))
    assert resident_memory(LoadedModel(model, 2), optimizer)["weights"] == 2 * weights
    for offloading in (optimizer, parameters):
        memory = resident_memory(LoadedModel(model, 3), offloading)
        assert memory["optimizer"] == memory["gradients"] == 0
    assert resident_memory(LoadedModel(model, 3), parameters)["weights"] == 0
    # Each process loads the model; offloaded are 16 bytes per weight over all processes.
    loaded = 4 * 2 * weights
    assert host_memory(training(LoadedModel(model, 2)), placement()) == loaded
    assert host_memory(training(LoadedModel(model, 2)), optimizer) == loaded + 16 * weights
    # With ZeRO 3, a process reads a quarter of the largest weight at a time.
    loaded = 4 * 2 * measure_size(model).largest / 4
    assert host_memory(training(LoadedModel(model, 3)), parameters) == loaded + 18 * weights


def test_frozen_models_are_offloaded():
    model, weights = opt_spec("opt-1.3b"), 2 * 1_315_758_080
    workload = training(LoadedModel(model, 0), frozen=[model, model])
    alone = placement(gpus_per_node=1)
    _, memory = peak_memory(workload, alone)
    assert memory["weights"] == 3 * weights
    offloading = replace(alone, offload_frozen=True)
    assert peak_memory(workload, offloading)[1]["weights"] < 3 * weights
    assert host_memory(workload, offloading) == host_memory(workload, alone) + 2 * weights


@pytest.mark.parametrize("nodes", [1, 8])
def test_opt_66b_fits_on_gpus_of_80_gb(nodes):
    """No process holds the whole model while it loads, trains, samples or saves."""
    model = opt_spec("opt-66b", lora_rank=128)
    eight = placement(nodes=nodes, gpus_per_node=8, zero_stage=3)
    batch, sampled = BatchShape(1, 512, 256), BatchShape(8, 512, 256)
    workload = training(LoadedModel(model, 3), frozen=[model], largest=batch, sampled=sampled)
    _, memory = peak_memory(workload, eight, GPU)
    # The partitions of the model and of its reference, and what is gathered at a time.
    partition = 2 * measure_size(model).weights / (8 * nodes)
    gathered = 0.08 * 2 * measure_size(model).weights
    assert 2 * partition < memory["weights"] < 2 * partition + gathered
    assert sum(memory.values()) < 0.9 * GPU
    assert host_memory(workload, eight) < 2 << 30
    # Evaluations; a reward model scores in fp32.
    for evaluated, generation in (
        (opt_spec("opt-66b"), sampled),
        (opt_spec("opt-66b", SCORE, "fp32"), None),
    ):
        workload = evaluation(evaluated, batch, generation)
        _, memory = peak_memory(workload, eight, GPU)
        assert memory["weights"] > weight_bytes(evaluated) / (8 * nodes)
        assert sum(memory.values()) < 0.9 * GPU
        assert host_memory(workload, eight) < 4 << 30


def test_evaluations_offload_parameters():
    workload, offloading = evaluation(small_spec()), placement(zero_stage=3, offload="parameters")
    memory = [
        peak_memory(workload, replace(offloading, offload=offload))[1]["weights"]
        for offload in ("none", "parameters")
    ]
    assert memory[0] - memory[1] == weight_bytes(small_spec()) / 4
    assert host_memory(workload, offloading) > weight_bytes(small_spec())


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


def test_a_model_is_gathered_to_sample_if_it_takes_a_third_of_a_gpu_at_most():
    model = opt_spec("opt-13b")
    whole = 2 * measure_size(model).weights
    workload = training(LoadedModel(model, 3), sampled=SAMPLED)
    weights = [
        peak_memory(workload, placement(zero_stage=3), memory << 30)[1]["weights"]
        for memory in (80, 40)
    ]
    assert weights[0] == pytest.approx(whole + whole / 4)
    assert weights[1] < 0.5 * whole


def test_vllm_takes_its_fraction_of_a_gpu_only_while_it_generates():
    model, partitioned = opt_spec("opt-13b"), placement(zero_stage=3)
    whole = weight_bytes(model)
    assert vllm_memory(model, GPU, 4) == {"weights": whole / 4, "cache": 0.3 * GPU - whole / 4}
    workload = training(LoadedModel(model, 3), sampled=SAMPLED, vllm_ranks=4)
    moment, memory = peak_memory(workload, partitioned, GPU)
    assert moment == "sampling"
    # A quarter of the trained model, and a quarter of vLLM's copy.
    assert memory["weights"] == whole / 2
    assert memory["cache"] == 0.3 * GPU - whole / 4
    # A large micro-batch needs more than vLLM, which sleeps.
    large = BatchShape(64, 1024, 1)
    moment, memory = peak_memory(workload._replace(largest=large), partitioned, GPU)
    assert (moment, memory["cache"]) == ("backward", 0)
    workload = evaluation(model, large, SAMPLED, vllm_ranks=4)
    assert peak_memory(workload, partitioned, GPU)[0] == "sampling"


def test_generation_holds_keys_and_values():
    memory = generation_memory(opt_spec("opt-13b"), BatchShape(8, length=512, targets=256))
    # Keys and values of 5120 dimensions in 40 layers, for 4096 tokens, and again for the prompts,
    # which are half of the tokens.
    assert memory["cache"] == 2 * 40 * 5120 * 2 * 4096 * 1.5


def test_a_saved_model_has_the_dtype_of_training_unless_another_one_is_set():
    weights = measure_size(small_spec()).weights
    # Merged weights, and adapters of 256 elements.
    adapted = training(LoadedModel(small_spec(lora_rank=1), 3))
    assert result_bytes(adapted, None) == 2 * weights + 2 * 256
    assert checkpoint_bytes(adapted) == 12 * 256
    whole = training(LoadedModel(small_spec(dtype="fp32"), 0))
    assert result_bytes(whole, None) == 4 * weights
    assert result_bytes(whole._replace(ema=True), "bf16") == 2 * 2 * weights
