"""What run.json says about the GPUs of a training: their name, driver, CUDA and NCCL."""

import re
from pathlib import Path

import torch

DRIVER = Path("/proc/driver/nvidia/version")


def gpu_record() -> dict[str, str]:
    """Return the GPU of this process and the versions of its software, as far as they are known."""
    versions = {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
    }
    if torch.distributed.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {name: version for name, version in versions.items() if version}


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, or None without one."""
    try:
        text = DRIVER.read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return match and match[1]
