"""Floating-point operations of training, GPUs' peak rates, and communication of ZeRO stages.

A model is described by the keys that run.json has: weights, trained, layers, hidden_size.
"""

from collections.abc import Mapping

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
