"""Floating-point operations of training, and GPUs with their peak rates.

A model is described by the keys that run.json has: weights, trained, layers, hidden_size.
"""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml


class Gpu(NamedTuple):
    """A GPU.

    memory: bytes. flops: dense 16-bit operations per second. bandwidth: of memory, bytes per
    second. name: what the driver's name of the GPU contains.
    """

    memory: int
    flops: float
    bandwidth: float
    name: str = ""


_TABLE = yaml.safe_load((Path(__file__).parent / "tables" / "gpus.yaml").read_text("utf-8"))
GPUS: dict[str, Gpu] = {name: Gpu(**values) for name, values in _TABLE.items()}
GPU_SYNTAX = "GB,TFLOPS,GB/s such as 48,181,864"


def flops_per_token(passes: Iterable[tuple[Mapping[str, int], int, int]], length: float) -> float:
    """Return the FLOPs per token of models.

    A forward pass has 2 per weight. Attention, Q K^T and the weighted sum of V, has 4 * layers *
    hidden_size * length: Chowdhery et al. 2022 (PaLM), appendix B, whose factor 12 covers forward
    and backward. Both together are three forward passes, without 2 for each frozen weight, which
    has no gradient. Recomputation by activation checkpointing does not count.

    passes: Each model, its forward passes, and the forward and backward passes that train it.
    length: Mean length of a sequence.
    """
    total = 0.0
    for model, forwards, epochs in passes:
        forward = 2 * model["weights"] + 4 * model["layers"] * model["hidden_size"] * length
        frozen = model["weights"] - model["trained"]
        total += forwards * forward + epochs * (3 * forward - 2 * frozen)
    return total


def peak_flops(name: str) -> float | None:
    """Return the peak 16-bit operations per second of a GPU by its driver's name, or None."""
    return next((gpu.flops for gpu in GPUS.values() if gpu.name in name), None)


def parse_gpu(text: str) -> Gpu:
    """Return a GPU by its name, or by its memory in GB, TFLOPS and GB/s: 48,181,864.

    Raises:
        argparse.ArgumentTypeError: The text is neither.
    """
    if text in GPUS:
        return GPUS[text]
    try:
        memory, tflops, bandwidth = map(float, text.split(","))
    except ValueError:
        expected = f"{', '.join(GPUS)} or {GPU_SYNTAX}"
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}") from None
    return Gpu(int(memory * 1e9), tflops * 1e12, bandwidth * 1e9, text)
