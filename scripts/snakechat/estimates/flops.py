"""Floating-point operations of training, and GPUs with their peak rates.

A model is described by the keys that run.json has: weights, trained, layers, hidden_size.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

# Dense 16-bit operations per second from NVIDIA's data sheets, without sparsity. The first key that
# is in the GPU's name applies.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX A6000": 155e12,
    "V100": 125e12,
}


def attention_flops(model: Mapping[str, int], length: float) -> float:
    """Return the forward FLOPs per token of attention: Q K^T and the weighted sum of V.

    4 * layers * hidden_size * length: Chowdhery et al. 2022 (PaLM), appendix B, whose factor 12
    covers forward and backward.
    """
    return 4 * model["layers"] * model["hidden_size"] * length


def forward_flops(model: Mapping[str, int], length: float) -> float:
    """Return the forward FLOPs per token at a mean sequence length: 2 per weight, and attention."""
    return 2 * model["weights"] + attention_flops(model, length)


def training_flops(model: Mapping[str, int], length: float) -> float:
    """Return the forward and backward FLOPs per token at a mean sequence length.

    PaLM's 6 per weight, and attention three times. A frozen weight has no gradient, which saves 2
    of the 6. Recomputation by activation checkpointing does not count.
    """
    return 4 * model["weights"] + 2 * model["trained"] + 3 * attention_flops(model, length)


def rlhf_flops(models: Mapping[str, Mapping[str, int]], length: float, ppo_epochs: int) -> float:
    """Return the FLOPs per token of a rollout.

    Forward passes: the actor generates and evaluates the token, the reference evaluates it, reward
    model and critic score it. Actor and critic then train on it ppo_epochs times. A reward model is
    only counted with a critic, at the critic's size.

    Args:
        models: the actor, and the critic if any.
    """
    forwards = {"actor": 3, "critic": 2}
    return sum(
        forwards[name] * forward_flops(model, length) + ppo_epochs * training_flops(model, length)
        for name, model in models.items()
    )


def peak_flops(gpu: str) -> float | None:
    """Return the peak 16-bit operations per second of a GPU by its name, None if unknown."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in gpu), None)


class Gpu(NamedTuple):
    """A GPU.

    memory: bytes. flops: dense 16-bit operations per second. bandwidth: of memory, bytes per
    second. has_bf16: whether it has arithmetic in bf16.
    """

    memory: int
    flops: float
    bandwidth: float
    has_bf16: bool = True


# From NVIDIA's data sheets; the SXM form of GPUs that have two.
GPUS = {
    "l4": Gpu(24 << 30, PEAK_FLOPS["L4"], 0.3e12),
    "rtx4090": Gpu(24 << 30, PEAK_FLOPS["RTX 4090"], 1.008e12),
    "v100-32g": Gpu(32 << 30, PEAK_FLOPS["V100"], 0.9e12, has_bf16=False),
    "a6000": Gpu(48 << 30, PEAK_FLOPS["RTX A6000"], 0.768e12),
    "l40s": Gpu(48 << 30, PEAK_FLOPS["L40S"], 0.864e12),
    "a100-40g": Gpu(40 << 30, PEAK_FLOPS["A100"], 1.555e12),
    "a100-80g": Gpu(80 << 30, PEAK_FLOPS["A100"], 2.039e12),
    "a800": Gpu(80 << 30, PEAK_FLOPS["A800"], 2.039e12),
    "h100": Gpu(80 << 30, PEAK_FLOPS["H100"], 3.35e12),
    "h800": Gpu(80 << 30, PEAK_FLOPS["H800"], 3.35e12),
    "b200": Gpu(180 * 10**9, PEAK_FLOPS["B200"], 8e12),
    "h200": Gpu(141 * 10**9, PEAK_FLOPS["H200"], 4.8e12),
}
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
