"""Weights of which a process has a partition only.

ZeRO 3 partitions the weights of a model over the processes. This module reads the whole weights in
a context that the engine provides, and knows their shapes.
"""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

# Returns a context in which every process has the whole of some weights. All processes must enter
# it with the same weights.
Gather = Callable[[Sequence[torch.Tensor]], AbstractContextManager[Any]]

# Returns the whole fp32 value of a weight in training. All processes must call it with the same
# weight.
Master = Callable[[torch.Tensor], torch.Tensor]


def no_gather(weights: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """Return a context that does nothing, for weights that every process has."""
    return contextlib.nullcontext()


def whole_shape(weight: torch.Tensor) -> torch.Size:
    """Return the shape of a weight, partitioned or not."""
    # DeepSpeed's attribute of a partitioned one.
    return getattr(weight, "ds_shape", weight.shape)
