"""The processes of a job: their ranks and the collective operations between them.

A launcher (torchrun, a cluster) sets RANK and WORLD_SIZE in the environment of each process.
Collective operations need the process group of snakechat.training.process_group, except in a single
process, where they return their argument. Processes that torchrun started can share the result of a
check before the group exists (verified_once_per_node).

torch is imported where it is needed: programs without it use the ranks.
"""

import itertools
import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Scalar = TypeVar("Scalar", bool, int, float)
T = TypeVar("T")

# How long a process waits for a check of the first process of its node. Reading the files of a
# large model from a slow disk takes hours.
CHECK_TIMEOUT = timedelta(days=1)
# The number of the next check, the same in all processes.
_numbers = itertools.count()


def rank() -> int:
    """Return the rank of this process, from 0."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Return the number of processes of the job."""
    return int(os.environ.get("WORLD_SIZE", 1))


def verified_once_per_node(check: Callable[[], T]) -> T:
    """Return check(), which only the first process of each node calls.

    Checks read files of up to hundreds of gigabytes, which every process would otherwise read. All
    processes must call this function, as often as the others. They share the outcome in the store
    that torchrun keeps for its processes and that ends with it; without torchrun, every process
    calls check.

    Args:
        check: Returns a JSON value. Without a process group, it must not change any file.

    Raises:
        InputError: check raised it in the first process of the node.
    """
    # torchrun sets these, and TORCHELASTIC_USE_AGENT_STORE where its store may be used.
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == 1 or not has_store:
        return check()
    from torch.distributed import TCPStore

    # The errors of this module's users: they import this module.
    from snakechat.workflow.errors import InputError

    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=CHECK_TIMEOUT,
        wait_for_workers=False,
    )
    key = f"snakechat/check {next(_numbers)} of node {os.environ['GROUP_RANK']}"
    if os.environ["LOCAL_RANK"] != "0":
        # If the first process dies, torchrun ends this one.
        outcome = json.loads(store.get(key))
        if outcome["error"] is not None:
            raise InputError(outcome["error"])
        return outcome["value"]
    try:
        value = check()
    except InputError as error:
        store.set(key, json.dumps({"error": str(error)}))
        raise
    store.set(key, json.dumps({"error": None, "value": value}))
    return value


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
