"""The processes of a job: ranks, collective operations, deterministic kernels, and stop signals.

A launcher (torchrun, a cluster) sets RANK and WORLD_SIZE in the environment of each process.
Collective operations need the process group of snakechat.training.placed_models, except in a single
process, where they return their argument.

torch is imported where it is needed: every job imports this module, and torch must count for those
alone that run models.
"""

import ctypes
import os
import re
import signal
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


# --- deterministic kernels --------------------------------------------------------------------

# A kernel of a GPU that adds numbers by atomic operations rounds differently in each run. Libraries
# choose such kernels where they are fastest, unless they are configured: torch by programs, when
# they choose their device (snakechat.modeling.acceleration), others by variables.

# Libraries read these when a process uses a GPU first. cuBLAS has the same workspace in each run;
# NCCL adds in the order of its rings and trees, and not in a switch (NVLink SHARP).
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS,NVLSTree"}
# Set in the processes of jobs that use deterministic kernels.
REQUEST = "SNAKECHAT_DETERMINISTIC"


def request_deterministic_kernels() -> None:
    """Have this process use deterministic kernels. Call it before the process uses a GPU."""
    os.environ[REQUEST] = "1"
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def uses_deterministic_kernels() -> bool:
    """Return whether this process uses deterministic kernels."""
    return REQUEST in os.environ


def missing_kernel(error: Exception) -> str | None:
    """Return the name of an operation without a deterministic kernel, if it is what failed."""
    match = re.match(r"(\S+) does not have a deterministic implementation", str(error))
    return match[1] if isinstance(error, RuntimeError) and match else None


# --- signals ----------------------------------------------------------------------------------

# Signals that ask a job to stop; SIGHUP when its terminal is closed.
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Of prctl(2).
PR_SET_PDEATHSIG = 1


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to stop; without SIGHUP if nohup started it."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(each for each in FORWARDED if each != signal.SIGHUP or not ignores_hangup)


def end_with_parent() -> None:
    """Have the kernel kill this process when the process that started it ends.

    Raises:
        OSError: It denies that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
