"""Deterministic kernels, for jobs whose spec has `deterministic`.

A kernel of a GPU that adds numbers by atomic operations rounds differently in each run. torch
chooses such kernels where they are fastest, unless it is configured here.
"""

import os
import re
from typing import Any, cast

# Libraries read these when a process uses a GPU first. cuBLAS has the same workspace in each run;
# NCCL adds in the order of its rings and trees, and not in a switch (NVLink SHARP).
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS,NVLSTree"}


def use_deterministic_kernels() -> None:
    """Have torch use kernels that always give the same result; others raise an error.

    Call it before the process uses a GPU.
    """
    import torch

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    # It would write to memory that deferred weights reserve and never use.
    cast(Any, torch.utils.deterministic).fill_uninitialized_memory = False


def missing_kernel(error: Exception) -> str | None:
    """Return the name of an operation without a deterministic kernel, if it is what failed."""
    match = re.match(r"(\S+) does not have a deterministic implementation", str(error))
    return match[1] if isinstance(error, RuntimeError) and match else None
