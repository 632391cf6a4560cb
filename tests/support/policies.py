"""Policies over a few tokens, masks and gradients, for tests of equations."""

import torch

CLIP, CLIP_HIGH = 0.2, 0.3


def ragged_mask(lengths, width):
    return torch.tensor([[t < length for t in range(width)] for length in lengths])


def vocabulary(seed, size=5):
    """Logits of a policy that learns and log-probabilities of another one, each of one token."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=random, dtype=torch.float64, requires_grad=True)
    other = torch.randn(size, generator=random, dtype=torch.float64).log_softmax(0)
    return logits, other


def gradient(loss, *by):
    found = torch.autograd.grad(loss, by, retain_graph=True)
    return found[0] if len(by) == 1 else found
