"""Memory and time of workloads, by hand and compared with published ones."""

from argparse import ArgumentTypeError
from dataclasses import replace

import pytest

from snakechat.estimates.flops import GPUS, Gpu, parse_gpu
from snakechat.estimates.job_estimate import GIB, total_flops, total_seconds
from snakechat.estimates.memory import (
    SCORE,
    BatchShape,
    Run,
    Workload,
    measure_size,
    peak_memory,
)
from snakechat.workflow.processes import Placement
from support.specs import ONE_GPU, opt_spec, small_spec

# --- memory -----------------------------------------------------------------------------------

BATCH = BatchShape(1, 64, 1)
GPU = 80 << 30


def four_gpus(**changes):
    return Placement(gpus_per_node=4, **changes)


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
    memory = memory_of(training(model, stage), four_gpus(offload=offload))
    size = measure_size(model)
    gathered = 2 * max(size["layer"], size["largest"]) if stage == 3 else 0
    assert memory["weights"] == weights * (size["weights"] - size["trained"]) + gathered
    assert memory["training"] == training_bytes * size["trained"]


def test_frozen_models_are_offloaded():
    model, weights = opt_spec("opt-1.3b"), 2 * 1_315_758_080
    workload = training(model, frozen=[Run(model, 0, 1), Run(model, 0, 1)])
    assert memory_of(workload, ONE_GPU)["weights"] == 2 * weights
    offloading = replace(ONE_GPU, offload_frozen=True)
    assert memory_of(workload, offloading)["weights"] < 2 * weights


def test_vllm_takes_its_fraction_of_a_gpu_only_while_it_generates():
    model, partitioned = opt_spec("opt-13b"), four_gpus(zero_stage=3)
    workload = training(model, 3, vllm_ranks=4)
    moment, memory = peak_memory(workload, partitioned, GPU)
    assert (moment, memory["vllm"]) == ("sampling", int(0.3 * GPU))


def test_sampling_takes_whole_weights_and_the_tokens_of_the_placement():
    model, partitioned = opt_spec("opt-1.3b"), four_gpus(zero_stage=3)
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
    together = memory_of(workload, four_gpus())["weights"]
    memory = memory_of(workload._replace(one_at_a_time=True), four_gpus())
    assert together == small.weight_bytes + large.weight_bytes
    assert memory["weights"] == large.weight_bytes


# --- time -----------------------------------------------------------------------------------

SHAPE = BatchShape(sequences=8, length=512, targets=256)


def work(run, rows=1, length=10):
    return Workload([run], rows, length, length, SHAPE)


def test_flops_of_a_sequence():
    weights, attention = measure_size(small_spec())["weights"], 4 * 2 * 8 * 10
    assert total_flops(work(Run(small_spec(), 0, forwards=1))) == 10 * (2 * weights + attention)
    assert total_flops(work(Run(small_spec(), 0, epochs=1))) == 10 * (6 * weights + 3 * attention)
    recomputing = small_spec(activation_checkpointing=True)
    assert total_flops(work(Run(recomputing, 0, epochs=1))) == 10 * (8 * weights + 4 * attention)
    adapted = small_spec(lora_rank=1)
    expected = 10 * (4 * measure_size(adapted)["weights"] + 2 * 256 + 3 * attention)
    assert total_flops(work(Run(adapted, 0, epochs=1), rows=3)) == 3 * expected


# Weights, and the cache of 384 tokens of each of 8 rows on average.
BYTES_READ = 2 * 12_853_473_280 + 2 * 2 * 40 * 5120 * 8 * 384


@pytest.mark.parametrize(
    ("sampling", "bandwidth", "gpus", "seconds"),
    [
        # Two batches of 8 rows on each of 2 GPUs, with 0.5 ms besides reading.
        ({"responses": 31}, 1e12, 2, 2 * 256 * (BYTES_READ / 0.5e12 + 5e-4)),
        # Two engines of 4 GPUs, each with two batches of 8 rows.
        ({"responses": 32, "vllm_ranks": 4}, 1e12, 8, 512 * (BYTES_READ / 4 / 0.5e12 + 5e-4)),
    ],
)
def test_seconds_of_sampling_responses(sampling, bandwidth, gpus, seconds):
    run = Run(opt_spec("opt-13b"), 0, samples=True)
    workload = work(run)._replace(sampled=SHAPE, **sampling)
    gpu = Gpu(memory=GIB, flops=1e15, bandwidth=bandwidth)
    assert total_seconds(workload, gpu, gpus) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("actor", "gpu", "gpus", "hours"),
    [
        ("13b", "a100-40g", 8, 10.8),
        ("30b", "a100-80g", 8, 18.0),
    ],
)
def test_rlhf_hours_are_within_25_percent_of_deepspeed_chats(actor, gpu, gpus, hours):
    # From DeepSpeed-Chat's README: step 3 on 264,292 prompts of 256 tokens with responses of 256
    # tokens, a reward model of 350m, and batches that fill the GPUs.
    rows, shape = 264_292, BatchShape(sequences=64, length=512, targets=256)
    model = opt_spec(f"opt-{actor}", activation_checkpointing=True)
    reward = opt_spec("opt-350m", SCORE)
    runs = [
        Run(model, 0, forwards=2, epochs=1, samples=True),
        Run(reward, 0, forwards=2, epochs=1),
    ]
    workload = Workload(runs, rows, 512, 512, shape, responses=rows, sampled=shape)
    assert total_seconds(workload, GPUS[gpu], gpus) / 3600 == pytest.approx(hours, rel=0.25)


def test_a_gpu_has_a_name_or_numbers():
    assert parse_gpu("h100") == GPUS["h100"]
    assert parse_gpu("48,181,864") == Gpu(48 * 10**9, 181e12, 864e9, "48,181,864")
    for text in ("h1000", "48", "48GB,181,864"):
        with pytest.raises(ArgumentTypeError, match=r"expected b200, .* 48,181,864"):
            parse_gpu(text)
