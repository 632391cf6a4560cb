"""Environment variables that change numerical results: reset for each job, or set by its placement.

The code of this module counts for every program. Standard library only: the workflow imports it
while it plans.
"""

import os
from collections.abc import Mapping

# Starts of the names of variables by which libraries round in another way on the same CPU or GPU:
# instructions, threads and precision of torch, MKL, oneDNN, OpenMP, OpenBLAS, NumPy and the C
# library; and the one by which Python skips assert statements, which may decide the scores of
# reward functions.
ARITHMETIC_VARIABLES = (
    "PYTHONOPTIMIZE",
    *("ATEN_", "MKL_", "ONEDNN_", "DNNL_", "OMP_DYNAMIC", "OMP_THREAD_LIMIT", "OPENBLAS_", "NPY_"),
    *("NVIDIA_TF32_", "TORCH_ALLOW_TF32_", "TORCH_BLAS_", "TORCH_CUDNN_", "TORCH_LINALG_"),
    *("TORCH_LINEAR_", "TORCH_MKLDNN_", "TORCH_ROCM_", "GLIBC_TUNABLES"),
)
# Starts of the names of variables of networks and their libraries: they move bytes.
NETWORK_VARIABLES = (
    *("NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "OMPI_", "PSM2_", "PSM3_", "TP_", "TORCH_NCCL_"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)


def computing_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a placement that a result is made from: all but network variables."""
    return {
        name: value for name, value in environment.items() if not name.startswith(NETWORK_VARIABLES)
    }


def prepare_environment() -> None:
    """Have the programs that this process becomes or starts compute in the same way everywhere."""
    for name in [name for name in os.environ if name.startswith(ARITHMETIC_VARIABLES)]:
        del os.environ[name]
    # Files are read and written as UTF-8 in any locale.
    os.environ["PYTHONUTF8"] = "1"
    # Threads that wait spin for some tenths of a millisecond, in which the next operation mostly
    # begins, and then sleep. Spinning for longer would take cores from other jobs.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # Otherwise, MKL takes fewer threads where a machine has fewer cores, and adds in another order.
    os.environ["MKL_DYNAMIC"] = "FALSE"


def set_threads(number: int) -> None:
    """Set the number of CPU threads of the libraries that a process of the job loads."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ[name] = str(number)
