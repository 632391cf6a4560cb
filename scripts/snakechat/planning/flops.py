"""What training costs: operations of a step, how well they fill a GPU, what ZeRO stages send.

A model is told as in NAME.run.json: weights, trained, layers, hidden_size.
"""

# Operations of 16-bit numbers a second of a GPU, by the names that it goes by; without sparsity,
# as NVIDIA's data sheets have them. The first name that is part of a GPU's own is meant.
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX A6000": 155e12,
    "V100": 125e12,
}


def attention_flops(model, length):
    """Operations of attention for a token, forward: Q K and the sum of V, over a whole sequence.

    4 * layers * hidden_size * length: Chowdhery et al. 2022 (PaLM), appendix B, where the 12 is
    that of forward and backward.
    """
    return 4 * model["layers"] * model["hidden_size"] * length


def forward_flops(model, length):
    """Operations for a token of sequences of a mean length: 2 a weight, and attention's."""
    return 2 * model["weights"] + attention_flops(model, length)


def training_flops(model, length):
    """Operations for a token, forward and backward: PaLM's 6 a weight, and attention three times.

    A weight that is not trained has no gradient, which saves 2 of the 6. What is computed anew
    (activation checkpointing) does not count.
    """
    return 4 * model["weights"] + 2 * model["trained"] + 3 * attention_flops(model, length)


def rlhf_flops(models, length, ppo_epochs):
    """Operations for a token of a rollout. models: the actor and, where there is one, the critic.

    Forward: the actor samples it and rates it, the reference rates it; reward model and critic
    score it. Then both learn from it, ppo_epochs times. A reward model without a critic of its size
    is not counted.
    """
    forwards = {"actor": 3, "critic": 2}
    return sum(
        forwards[name] * forward_flops(model, length) + ppo_epochs * training_flops(model, length)
        for name, model in models.items()
    )


def peak_flops(gpu):
    """Operations of 16-bit numbers a second that a GPU is built for, by its name; None: unknown."""
    return next((peak for name, peak in PEAKS.items() if name in gpu), None)


def sent_elements(model, stage, processes):
    """Elements that each process sends for a step of one pass, as the ZeRO paper counts them.

    Rajbhandari et al. 2020, section 7: gradients are summed and cut up, and weights gathered from
    those who update them: 2 a weight. Stage 3 gathers all weights twice instead, forward and
    backward, trained or not: 3 a weight. One process has nobody to send to.
    """
    if processes == 1:
        return 0
    return model["trained"] + (2 * model["weights"] if stage == 3 else model["trained"])
