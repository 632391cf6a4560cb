"""Floating-point operations of training, and GPUs with their peak rates.

A model is described by the keys that run.json has: weights, trained, layers, hidden_size.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple


class Gpu(NamedTuple):
    """A GPU.

    memory: bytes. flops: dense 16-bit operations per second. bandwidth: of memory, bytes per
    second. name: what the driver's name of the GPU contains. has_bf16: whether it has arithmetic in
    bf16.
    """

    memory: int
    flops: float
    bandwidth: float
    name: str = ""
    has_bf16: bool = True


# From NVIDIA's data sheets, without sparsity; of the SXM form unless the name says PCIe. If a
# driver's name contains several of these names, the first one applies.
GPUS = {
    "b200": Gpu(180 * 10**9, 2250e12, 8e12, "B200"),
    "h200": Gpu(141 * 10**9, 989e12, 4.8e12, "H200"),
    "h100-pcie": Gpu(80 << 30, 756e12, 2e12, "H100 PCIe"),
    "h100": Gpu(80 << 30, 989e12, 3.35e12, "H100"),
    "h800-pcie": Gpu(80 << 30, 756e12, 2e12, "H800 PCIe"),
    "h800": Gpu(80 << 30, 989e12, 3.35e12, "H800"),
    "a100-80g": Gpu(80 << 30, 312e12, 2.039e12, "A100"),
    "a100-40g": Gpu(40 << 30, 312e12, 1.555e12, "A100"),
    "a800": Gpu(80 << 30, 312e12, 2.039e12, "A800"),
    "l40s": Gpu(48 << 30, 362e12, 0.864e12, "L40S"),
    "l40": Gpu(48 << 30, 181e12, 0.864e12, "L40"),
    "l4": Gpu(24 << 30, 121e12, 0.3e12, "L4"),
    "rtx4090": Gpu(24 << 30, 165e12, 1.008e12, "RTX 4090"),
    "a6000": Gpu(48 << 30, 155e12, 0.768e12, "RTX A6000"),
    "v100-32g": Gpu(32 << 30, 125e12, 0.9e12, "V100", has_bf16=False),
}
GPU_SYNTAX = "GB,TFLOPS,GB/s such as 48,181,864"


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


def rlhf_flops(
    models: Mapping[str, Mapping[str, int]],
    length: float,
    ppo_epochs: int,
    evaluated_in_update: bool = False,
) -> float:
    """Return the FLOPs per token of a rollout.

    Forward passes: the actor generates and evaluates the token, the reference evaluates it, reward
    model and critic score it. Actor and critic then train on it ppo_epochs times. A reward model is
    only counted with a critic, at the critic's size.

    Args:
        models: The actor, and the critic if any.
        evaluated_in_update: Whether the actor evaluates tokens while it trains on them.
    """
    forwards = {"actor": 2 if evaluated_in_update else 3, "critic": 2}
    return sum(
        forwards[name] * forward_flops(model, length) + ppo_epochs * training_flops(model, length)
        for name, model in models.items()
    )


def peak_flops(name: str) -> float | None:
    """Return the peak 16-bit operations per second of a GPU by its driver's name, or None."""
    return next((gpu.flops for gpu in GPUS.values() if gpu.name in name), None)


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
