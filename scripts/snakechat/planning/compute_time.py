"""Estimated FLOPs and seconds of training, scoring and generation on a GPU."""

import re
from typing import NamedTuple

from snakechat.planning import flops
from snakechat.planning.activation_memory import BatchShape, ModelSpec, measure_size
from snakechat.planning.flops import PEAK_FLOPS
from snakechat.planning.memory import BYTES_PER_ELEMENT, GIB


class Gpu(NamedTuple):
    """memory: bytes. flops: dense 16-bit operations per second. bandwidth: of memory, bytes per
    second. name: The key of PEAK_FLOPS; empty for a GPU that is described by its numbers.
    """

    memory: int
    flops: float
    bandwidth: float
    name: str = ""


def _gpu(memory: int, name: str, bandwidth: float) -> Gpu:
    """Return a GPU of PEAK_FLOPS."""
    return Gpu(memory, PEAK_FLOPS[name], bandwidth, name)


# From NVIDIA's data sheets; the SXM form of GPUs that have two.
GPUS = {
    "rtx4090": _gpu(24 * GIB, "RTX 4090", 1.008e12),
    "v100-32g": _gpu(32 * GIB, "V100", 0.9e12),
    "a6000": _gpu(48 * GIB, "RTX A6000", 0.768e12),
    "l40s": _gpu(48 * GIB, "L40S", 0.864e12),
    "a100-40g": _gpu(40 * GIB, "A100", 1.555e12),
    "a100-80g": _gpu(80 * GIB, "A100", 2.039e12),
    "h100": _gpu(80 * GIB, "H100", 3.35e12),
    "h200": _gpu(141 * 10**9, "H200", 4.8e12),
}

# Units of the numbers that describe another GPU, by the field of Gpu.
UNITS = {
    "memory": {"GB": 1e9, "GiB": GIB},
    "flops": {"TFLOPS": 1e12},
    "bandwidth": {"GB/s": 1e9, "TB/s": 1e12},
}
GPU_SYNTAX = "MEMORY,TFLOPS,BANDWIDTH such as 48GB,181TFLOPS,864GB/s"


def parse_gpu(text: str) -> Gpu:
    """Return a GPU by its name, or by its numbers: 48GB,181TFLOPS,864GB/s.

    Raises:
        ValueError: The text is neither.
    """
    if text in GPUS:
        return GPUS[text]
    found: dict[str, float] = {}
    numbers = [re.fullmatch(r" *(\d+(?:[.]\d+)?) *(\S+) *", word) for word in text.split(",")]
    for field, units in UNITS.items():
        for match in numbers:
            if match and match[2] in units:
                found[field] = float(match[1]) * units[match[2]]
    if len(numbers) != len(UNITS) or found.keys() != UNITS.keys() or not all(found.values()):
        raise ValueError(f"{text!r}: expected {', '.join(GPUS)} or {GPU_SYNTAX}")
    return Gpu(int(found["memory"]), found["flops"], found["bandwidth"])


# Assumptions: the fractions of the peak FLOPs that training and scoring reach, and of the bandwidth
# that generation reaches.
FLOPS_UTILIZATION = 0.4
BANDWIDTH_UTILIZATION = 0.5
# Assumed for training adapters. Their products are small and read large activations: fused kernels
# make layers with adapters 1.27 times as fast (Zhu et al. 2025, "LoRAFusion", abstract), and ours
# are not fused.
LORA_FLOPS_UTILIZATION = 0.3
# Python launches the kernels of a layer for a token in about a millisecond. Llama 2 7B in plain
# PyTorch samples 25.5 tokens per second on an A100, bound by launches: 1.2 ms for each of 32 layers
# (pytorch.org/blog/accelerating-generative-ai-2).
SECONDS_PER_LAYER = 1e-3
# Assumed time of a step besides reading memory, where a graph launches the kernels.
SECONDS_PER_CAPTURED_STEP = 5e-4


def inference_flops(model: ModelSpec, tokens: float, length: float) -> float:
    """Return the FLOPs of a forward pass over tokens of sequences of a mean length."""
    return tokens * flops.forward_flops(measure_size(model)._asdict(), length)


def training_flops(model: ModelSpec, tokens: float, length: float) -> float:
    """Return the FLOPs of training on tokens of sequences of a mean length.

    Includes what activation checkpointing recomputes, unlike flops.training_flops: it takes time.
    """
    recomputed = inference_flops(model, tokens, length) if model.activation_checkpointing else 0
    return tokens * flops.training_flops(measure_size(model)._asdict(), length) + recomputed


def compute_seconds(
    num_flops: float, gpu: Gpu, num_gpus: int, utilization: float = FLOPS_UTILIZATION
) -> float:
    """Return the seconds that FLOPs take on a number of GPUs."""
    return num_flops / (num_gpus * gpu.flops * utilization)


def generation_seconds(
    model: ModelSpec,
    num_rows: float,
    shape: BatchShape,
    gpu: Gpu,
    num_gpus: int,
    is_captured: bool = True,
    num_ranks: int = 1,
) -> float:
    """Return the seconds of generating responses to rows, on a number of GPUs.

    Each step reads all weights, and the keys and values so far, half of the response on average
    (Pope et al. 2022, section 2.1). Without a graph, launching the kernels is a lower bound.

    Args:
        shape: the largest batch that generates.
        is_captured: whether a graph launches the kernels of a step.
        num_ranks: GPUs that divide the model, its keys and values.
    """
    size, width = measure_size(model), BYTES_PER_ELEMENT[model.dtype]
    mean_length = shape.length - shape.targets / 2
    bytes_read = width * (size.weights + size.kv * shape.sequences * mean_length) / num_ranks
    seconds_per_step = bytes_read / (gpu.bandwidth * BANDWIDTH_UTILIZATION)
    if is_captured:
        seconds_per_step += SECONDS_PER_CAPTURED_STEP
    else:
        seconds_per_step = max(seconds_per_step, size.layers * SECONDS_PER_LAYER)
    num_batches = -(-num_rows * num_ranks // (shape.sequences * num_gpus))
    return num_batches * shape.targets * seconds_per_step
