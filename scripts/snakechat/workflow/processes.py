"""Where and how a job runs: its placement and options, its environment, its processes.

Changing them makes no result stale, apart from the environment that a placement sets. Other
environment variables that change numerical results are reset for each job.

A launcher (torchrun, a cluster) sets RANK and WORLD_SIZE in the environment of each process.
Collective operations need the process group of snakechat.training.placed_models, except in a single
process, where they return their argument.

The code of this module counts for every program, and torch for those alone that run models.
"""

import ctypes
import os
import re
import resource
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

ZeroStage = Literal[0, 1, 2, 3]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Hardware of a job, and how the job uses it.

    threads and mem_mb count on each node, and runtime is in minutes. Before it trains, a program
    replaces `auto` (snakechat.training.rungs). snakechat.modeling.models has what None means for
    each device, and critic_zero_stage defaults to zero_stage. The defaults suit a job without
    models: one process on a CPU, with Snakemake's default memory and time.
    """

    nodes: int = 1
    gpus_per_node: int = 0
    zero_stage: ZeroStage = 0
    offload: Literal["none", "optimizer", "parameters"] = "none"
    activation_checkpointing: bool = False
    micro_batch_tokens: int = 8192
    threads: int = 1
    mem_mb: int = 0
    runtime: int = 0
    generate_tokens: int | None = None
    cuda_graphs: bool | None = None
    # As transformers' argument of this name.
    attn_implementation: Literal["auto", "sdpa"] = "auto"
    compile: bool | None = None
    vllm_tensor_parallel_size: int = 1
    environment: dict[str, str] | None = None
    critic_zero_stage: ZeroStage | None = None
    offload_frozen: bool = False
    max_mem_mb: int | None = None
    slurm: dict[str, str] | None = None

    @property
    def num_processes(self) -> int:
        """Processes of a job: one for each GPU, or one on the CPU of each node."""
        return self.nodes * max(self.gpus_per_node, 1)

    def is_partitioned(self, dtype: str) -> bool:
        """Return whether the processes partition the weights of a model (ZeRO 3)."""
        return stage_used(self.zero_stage, dtype) == 3

    def evaluates_partitioned(self, dtype: str) -> bool:
        """Return whether a job that trains no model partitions those that it evaluates.

        A process that is alone and keeps them on its device has nothing to gain.
        """
        several = self.nodes > 1 or self.gpus_per_node > 1
        return self.is_partitioned(dtype) and (several or self.offload == "parameters")


def stage_used(zero_stage: int, dtype: str) -> int:
    """Return the ZeRO stage that a run with a requested stage uses: 2 if it is unsupported.

    Stage 1 accumulates gradients in 16 bits, and stage 0 has no loss scaling.
    """
    unsupported: dict[str, tuple[int, ...]] = {"fp32": (), "bf16": (1,), "fp16": (0, 1)}
    return 2 if zero_stage in unsupported[dtype] else zero_stage


SERIAL = Placement()


# --- options of a run -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Paths, addresses and limits of a run.

    Attributes:
        stores: Folders of the stores whose results are used. New ones go to the first.
        hermetic: Whether the kernel limits what the job reads and writes: auto, require or off.
        snakemake: The options of Snakemake with which the result is rebuilt.
        save_steps: Steps between two checkpoints.
        source: Folder of the external files of the job; empty if it has none.
        python: The interpreter of a command; empty if it is the build's, or none.
        llm_judges: Where and how LLM judges are asked, by name.
        versions: Folders in the store of compared versions, by recipe and kind of result; of a
            training log, the file itself.
    """

    stores: list[str] = field(default_factory=lambda: ["output/store"])
    hermetic: str = "auto"
    snakemake: list[str] = field(default_factory=list)
    save_steps: int = 1
    source: str = ""
    python: str = ""
    llm_judges: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    versions: Mapping[str, dict[str, str]] = field(default_factory=dict)


DEFAULTS = RunOptions()


def changed_values(record: Any) -> dict[str, Any]:
    """Return the values of a placement or of options that differ from their defaults."""
    defaults = vars(type(record)())
    return {key: value for key, value in vars(record).items() if value != defaults[key]}


# --- environment variables ------------------------------------------------------------------------

# Starts of the names of variables by which libraries round in another way on the same CPU or GPU;
# and the one by which Python skips assert statements, which may decide scores of reward functions.
ARITHMETIC_VARIABLES = (
    "PYTHONOPTIMIZE",
    *("ATEN_", "MKL_", "ONEDNN_", "DNNL_", "OMP_DYNAMIC", "OMP_THREAD_LIMIT", "OPENBLAS_", "NPY_"),
    *("NVIDIA_TF32_", "TORCH_ALLOW_TF32_", "TORCH_BLAS_", "TORCH_CUDNN_", "TORCH_LINALG_"),
    *("TORCH_LINEAR_", "TORCH_MKLDNN_", "TORCH_ROCM_", "GLIBC_TUNABLES"),
)


def prepare_environment() -> None:
    """Have the programs that this process becomes or starts compute in the same way everywhere."""
    for name in [name for name in os.environ if name.startswith(ARITHMETIC_VARIABLES)]:
        del os.environ[name]
    # Files are read and written as UTF-8 in any locale. Threads that wait spin for some tenths of a
    # millisecond, in which the next operation mostly begins, and then sleep: spinning for longer
    # would take cores from other jobs. Otherwise, MKL takes fewer threads where a machine has fewer
    # cores, and adds in another order.
    os.environ.update(PYTHONUTF8="1", OMP_WAIT_POLICY="PASSIVE", MKL_DYNAMIC="FALSE")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def set_threads(number: int) -> None:
    """Set the number of CPU threads of the libraries that a process of the job loads."""
    for library in ("OMP", "MKL", "OPENBLAS", "RAYON"):
        os.environ[f"{library}_NUM_THREADS"] = str(number)


# --- processes --------------------------------------------------------------------------------

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
    """Return the value of rank 0, a flag or a number from 0 on, in all processes."""
    return all_reduce_max(value if rank() == 0 else type(value)(0))


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
# choose such kernels where they are fastest, unless they are configured: torch by programs
# (snakechat.modeling.models), others by these variables. cuBLAS has the same workspace in
# each run; NCCL adds in the order of its rings and trees, and not in a switch (NVLink SHARP).
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
    """Have the kernel kill this process when the process that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)


@contextmanager
def limited_memory(max_bytes: int) -> Iterator[None]:
    """Limit what this process allocates in a context: allocations beyond it raise MemoryError.

    max_bytes: Memory in addition to what the process has. Mapped files do not count.
    """
    with open("/proc/self/statm") as file:
        allocated = int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [allocated + max_bytes, *(each for each in (soft, hard) if each >= 0)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
