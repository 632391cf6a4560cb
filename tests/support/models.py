"""Comparison of models and of their folders."""

import torch


def weights_equal(first, second):
    """Return whether two models have the same weights."""
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def files(folder):
    """Return the sorted names in a folder."""
    return sorted(path.name for path in folder.iterdir())
