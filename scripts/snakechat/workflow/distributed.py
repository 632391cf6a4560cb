"""The processes of a job: which one this is, and what they tell each other.

A launcher (torchrun, a cluster) tells each process its number in the environment. What they tell
each other needs the group that snakechat.training.engine.start joins; one process alone needs nothing.
"""

import os


def rank():
    """The number of this process, from 0."""
    return int(os.environ.get("RANK", 0))


def world_size():
    """How many processes the job has."""
    return int(os.environ.get("WORLD_SIZE", 1))


def total(tensor):
    """The sum of the processes' tensors, in all of them."""
    return _reduced(tensor, "SUM") if world_size() > 1 else tensor


def largest(number):
    """The largest of the processes' numbers, in all of them: of flags, whether any is true."""
    if world_size() == 1:
        return number
    import torch

    return type(number)(_reduced(torch.tensor(number, dtype=torch.float64), "MAX").item())


def from_first(value):
    """The bool, int or float that process 0 has, in all of them."""
    if world_size() == 1:
        return value
    import torch

    kept = value if rank() == 0 else 0
    return type(value)(_reduced(torch.tensor(kept, dtype=torch.float64), "SUM").item())


def barrier():
    """Wait until all processes are here."""
    largest(0)


def _reduced(tensor, operation):
    from torch import distributed

    # NCCL takes nothing that is not on the process's GPU.
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    shared = tensor.to(device, copy=True)
    distributed.all_reduce(shared, getattr(distributed.ReduceOp, operation))
    return shared.to(tensor.device)
