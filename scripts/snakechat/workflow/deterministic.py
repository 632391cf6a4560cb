"""Deterministic kernels, for jobs whose spec has `deterministic`.

A kernel of a GPU that adds numbers by atomic operations rounds differently in each run. Libraries
choose such kernels where they are fastest, unless they are configured.

Standard library only: every job imports this module, and torch must count for those alone that run
models. They configure torch when they choose their device (snakechat.modeling.acceleration).
"""

import os
import re

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


def are_requested() -> bool:
    """Return whether this process uses deterministic kernels."""
    return REQUEST in os.environ


def missing_kernel(error: Exception) -> str | None:
    """Return the name of an operation without a deterministic kernel, if it is what failed."""
    match = re.match(r"(\S+) does not have a deterministic implementation", str(error))
    return match[1] if isinstance(error, RuntimeError) and match else None
