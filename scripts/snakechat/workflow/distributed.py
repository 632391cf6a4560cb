"""The processes of a job: their ranks and the collective operations between them.

A launcher (torchrun, a cluster) sets RANK and WORLD_SIZE in the environment of each process.
Collective operations need the process group of snakechat.training.placed_models, except in a single
process, where they return their argument.

torch is imported where it is needed: programs without it use the ranks.
"""

import os
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Scalar = TypeVar("Scalar", bool, int, float)


def rank() -> int:
    """Return the rank of this process, from 0."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Return the number of processes of the job."""
    return int(os.environ.get("WORLD_SIZE", 1))


def all_reduce_sum(tensor: "Tensor") -> "Tensor":
    """Return the sum of a tensor over all processes; the argument does not change."""
    return _all_reduce(tensor, "SUM") if world_size() > 1 else tensor


def all_reduce_max(number: Scalar) -> Scalar:
    """Return the maximum of a number over all processes; of flags, whether any is true."""
    if world_size() == 1:
        return number
    import torch

    return type(number)(_all_reduce(torch.tensor(number, dtype=torch.float64), "MAX").item())


def broadcast_from_first(value: Scalar) -> Scalar:
    """Return the value of rank 0 in all processes."""
    if world_size() == 1:
        return value
    import torch

    addend = value if rank() == 0 else 0
    return type(value)(_all_reduce(torch.tensor(addend, dtype=torch.float64), "SUM").item())


def barrier() -> None:
    """Wait until every process has reached this line."""
    all_reduce_max(0)


def _all_reduce(tensor: "Tensor", operation: str) -> "Tensor":
    from torch import distributed

    # NCCL reduces tensors on the GPU of the process only.
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    reduced = tensor.to(device, copy=True)
    distributed.all_reduce(reduced, getattr(distributed.ReduceOp, operation))
    return reduced.to(tensor.device)
