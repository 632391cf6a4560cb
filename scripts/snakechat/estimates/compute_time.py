"""Estimated FLOPs and seconds of training, scoring and generation on a GPU."""

import math
from typing import NamedTuple

from snakechat.estimates import flops
from snakechat.estimates.activation_memory import ModelSpec, measure_size
from snakechat.estimates.flops import PEAK_FLOPS
from snakechat.estimates.memory import BYTES_PER_ELEMENT, GIB, Generation, Workload


class Gpu(NamedTuple):
    """memory: bytes. flops: dense 16-bit operations per second. bandwidth: of memory, bytes per
    second.
    """

    memory: int
    flops: float
    bandwidth: float


# From NVIDIA's data sheets; the SXM form of GPUs that have two.
GPUS = {
    "l4": Gpu(24 * GIB, PEAK_FLOPS["L4"], 0.3e12),
    "rtx4090": Gpu(24 * GIB, PEAK_FLOPS["RTX 4090"], 1.008e12),
    "v100-32g": Gpu(32 * GIB, PEAK_FLOPS["V100"], 0.9e12),
    "a6000": Gpu(48 * GIB, PEAK_FLOPS["RTX A6000"], 0.768e12),
    "l40s": Gpu(48 * GIB, PEAK_FLOPS["L40S"], 0.864e12),
    "a100-40g": Gpu(40 * GIB, PEAK_FLOPS["A100"], 1.555e12),
    "a100-80g": Gpu(80 * GIB, PEAK_FLOPS["A100"], 2.039e12),
    "a800": Gpu(80 * GIB, PEAK_FLOPS["A800"], 2.039e12),
    "h100": Gpu(80 * GIB, PEAK_FLOPS["H100"], 3.35e12),
    "h800": Gpu(80 * GIB, PEAK_FLOPS["H800"], 3.35e12),
    "b200": Gpu(180 * 10**9, PEAK_FLOPS["B200"], 8e12),
    "h200": Gpu(141 * 10**9, PEAK_FLOPS["H200"], 4.8e12),
}

# Without arithmetic in bf16.
WITHOUT_BF16 = {"v100-32g"}

GPU_SYNTAX = "GB,TFLOPS,GB/s such as 48,181,864"


def parse_gpu(text: str) -> Gpu:
    """Return a GPU by its name, or by its memory in GB, TFLOPS and GB/s: 48,181,864.

    Raises:
        ValueError: The text is neither.
    """
    if text in GPUS:
        return GPUS[text]
    try:
        memory, tflops, bandwidth = numbers = [*map(float, text.split(","))]
        if not all(0 < number < math.inf for number in numbers):
            raise ValueError
    except ValueError:
        raise ValueError(f"{text!r}: expected {', '.join(GPUS)} or {GPU_SYNTAX}") from None
    return Gpu(int(memory * 1e9), tflops * 1e12, bandwidth * 1e9)


# Assumptions: the fractions of the peak FLOPs that training and scoring reach, and of the bandwidth
# that generation reaches; the time of a step of generation besides reading memory.
FLOPS_UTILIZATION = 0.4
BANDWIDTH_UTILIZATION = 0.5
SECONDS_PER_STEP = 5e-4


def forward_flops(model: ModelSpec, length: float) -> float:
    """Return the FLOPs of a forward pass over a sequence."""
    return length * flops.forward_flops(measure_size(model)._asdict(), length)


def training_flops(model: ModelSpec, length: float) -> float:
    """Return the FLOPs of training on a sequence.

    Includes what activation checkpointing recomputes, unlike flops.training_flops: it takes time.
    """
    recomputed = forward_flops(model, length) if model.activation_checkpointing else 0
    return length * flops.training_flops(measure_size(model)._asdict(), length) + recomputed


def total_seconds(workload: Workload, gpu: Gpu, num_gpus: int) -> float:
    """Return the seconds of a job on a number of GPUs; nan if the number of rows is unknown."""
    return workload.flops / (FLOPS_UTILIZATION * num_gpus * gpu.flops) + sum(
        generation_seconds(generation, gpu, num_gpus) for generation in workload.generations
    )


def generation_seconds(generation: Generation, gpu: Gpu, num_gpus: int) -> float:
    """Return the seconds of generating responses on a number of GPUs.

    Each step reads all weights, and the keys and values so far, half of the response on average
    (Pope et al. 2022, section 2.1). The processes of a vLLM engine divide them.
    """
    model, num_responses, shape, vllm_ranks = generation
    num_ranks = max(vllm_ranks, 1)
    size, width = measure_size(model), BYTES_PER_ELEMENT[model.dtype]
    mean_length = shape.length - shape.targets / 2
    bytes_read = width * (size.weights + size.kv * shape.sequences * mean_length) / num_ranks
    seconds_per_step = bytes_read / (gpu.bandwidth * BANDWIDTH_UTILIZATION) + SECONDS_PER_STEP
    num_batches = -(-num_responses * num_ranks // (shape.sequences * num_gpus))
    return num_batches * shape.targets * seconds_per_step
