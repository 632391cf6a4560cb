"""Estimated memory and disk, by hand."""

from dataclasses import replace

import pytest

from snakechat.estimates.activation_memory import BatchShape, measure_size
from snakechat.estimates.job_estimate import Run, Workload, peak_memory
from snakechat.workflow.placement import Placement
from support.specs import opt_spec, small_spec

BATCH = BatchShape(1, 64, 1)
GPU = 80 << 30


def placement(**changes):
    return Placement(**{"gpus_per_node": 4, **changes})


def training(model, stage=0, frozen=(), largest=BATCH, vllm_ranks=0):
    """Return the workload of training a model, which samples."""
    runs = [Run(model, stage, epochs=1, samples=True), *frozen]
    return Workload(runs, 0, 1, 1, largest, vllm_ranks=vllm_ranks)


def memory_of(workload, placement, gpu_memory=0):
    return peak_memory(workload, placement, gpu_memory)[1]


@pytest.mark.parametrize(
    ("stage", "offload", "weights", "training_bytes"),
    [
        (0, "none", 2, 18),
        (1, "none", 2, 4 + 12 / 4),
        (2, "none", 2, 2 + 14 / 4),
        (3, "none", 0.5, 4),
        (2, "optimizer", 2, 2),
        (3, "optimizer", 0.5, 0.5),
        (3, "parameters", 0, 0),
    ],
)
def test_resident_bytes_per_weight_with_four_processes(stage, offload, weights, training_bytes):
    # Only the adapters are trained.
    model = small_spec(lora_rank=1)
    memory = memory_of(training(model, stage), placement(offload=offload))
    size = measure_size(model)
    gathered = 2 * max(size.layer, size.largest) if stage == 3 else 0
    assert memory["weights"] == weights * (size.weights - size.trained) + gathered
    assert memory["training"] == training_bytes * size.trained


def test_frozen_models_are_offloaded():
    model, weights = opt_spec("opt-1.3b"), 2 * 1_315_758_080
    workload = training(model, frozen=[Run(model, 0, 1), Run(model, 0, 1)])
    alone = placement(gpus_per_node=1)
    assert memory_of(workload, alone)["weights"] == 2 * weights
    offloading = replace(alone, offload_frozen=True)
    assert memory_of(workload, offloading)["weights"] < 2 * weights


def test_opt_66b_fits_on_gpus_of_80_gb():
    model = opt_spec("opt-66b", lora_rank=128)
    eight = placement(gpus_per_node=8, zero_stage=3)
    workload = training(model, 3, [Run(model, 3, 1)], BatchShape(1, 512, 256))
    memory = memory_of(workload, eight, GPU)
    # The partitions of the model and of its reference, and a layer.
    partition = 2 * measure_size(model).weights / 8
    assert 1.9 * partition < memory["weights"] < 2 * partition + 3 * 10**9
    assert sum(memory.values()) < 0.9 * GPU


def test_vllm_takes_its_fraction_of_a_gpu_only_while_it_generates():
    model, partitioned = opt_spec("opt-13b"), placement(zero_stage=3)
    workload = training(model, 3, vllm_ranks=4)
    moment, memory = peak_memory(workload, partitioned, GPU)
    assert (moment, memory["vllm"]) == ("sampling", int(0.3 * GPU))
    # A large micro-batch needs more than vLLM, which sleeps.
    large = BatchShape(64, 1024, 1)
    moment, memory = peak_memory(workload._replace(largest=large), partitioned, GPU)
    assert (moment, memory["vllm"]) == ("training", 0)


def test_sampling_takes_whole_weights_and_the_tokens_of_the_placement():
    model, partitioned = opt_spec("opt-1.3b"), placement(zero_stage=3)
    moment, memory = peak_memory(training(model, 3), partitioned, GPU)
    assert (moment, memory["weights"], memory["cache"]) == ("sampling", model.weight_bytes, 0)
    # Keys and values of 24 layers of 2,048 dimensions.
    limited = replace(partitioned, generate_tokens=1000)
    _, memory = peak_memory(training(model, 3), limited, GPU)
    assert memory["cache"] == 1000 * 2 * 2 * 24 * 2048
    # A small GPU gathers a layer at a time.
    assert peak_memory(training(model, 3), partitioned, 1 << 30)[0] == "training"


def test_one_of_several_models_is_in_memory_at_a_time():
    small, large = opt_spec("opt-1.3b"), opt_spec("opt-6.7b")
    workload = Workload([Run(small, 0, 1), Run(large, 0, 1)], 0, 1, 1, BATCH)
    together = memory_of(workload, placement())["weights"]
    memory = memory_of(workload._replace(one_at_a_time=True), placement())
    assert together == small.weight_bytes + large.weight_bytes
    assert memory["weights"] == large.weight_bytes
