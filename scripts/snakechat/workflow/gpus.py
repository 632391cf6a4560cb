"""Assign each job GPUs of this machine that no other job uses.

Snakemake counts GPUs but does not say which ones a job may use. Each job locks the GPUs that it
uses, by files in a folder of the user under the temporary directory.
"""

import fcntl
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from snakechat.workflow.errors import InputError
from snakechat.workflow.locks import AlreadyLocked, acquire_lock


def claim_gpus(number: int) -> None:
    """Reserve GPUs for this process and those that it starts; set CUDA_VISIBLE_DEVICES.

    Does nothing if the machine has fewer GPUs: the program that needs them reports that.

    Raises:
        InputError: Other jobs use too many of the GPUs.
    """
    devices = visible_devices()
    slurm_job = os.environ.get("SLURM_JOB_ID")
    # Slurm assigns each job its GPUs. In an interactive job with more of them, several of our jobs
    # may run at once.
    if len(devices) < number or (slurm_job and len(devices) == number):
        return
    names = ["snakechat", str(os.getuid()), *([slurm_job] if slurm_job else [])]
    folder = Path(tempfile.gettempdir(), "-".join(names))
    folder.mkdir(mode=0o700, exist_ok=True)
    claimed: list[str] = []
    # One job claims at a time: if two jobs each held half of the GPUs, neither could start.
    with open(folder / "choice.lock", "w") as choice:
        fcntl.flock(choice, fcntl.LOCK_EX)
        for device in devices:
            with suppress(AlreadyLocked):
                if len(claimed) < number:
                    acquire_lock(folder / f"{device.replace('/', '-')}.lock")
                    claimed.append(device)
    if len(claimed) < number:
        raise InputError(
            f"{len(claimed)} of {len(devices)} GPUs are free and this job needs {number}: start"
            f" Snakemake with --resources gpu={len(devices)}, so that it counts them"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(claimed)


def has_gpu() -> bool:
    """Return whether this machine seems to have a GPU, without importing torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    # Device files of NVIDIA, AMD and WSL.
    devices = Path("/dev")
    return any(devices.glob("nvidia[0-9]*")) or any(
        (devices / name).exists() for name in ("kfd", "dxg")
    )


def visible_devices() -> list[str]:
    """Return the ids of the GPUs that the user or the cluster allows, or of all GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device for device in visible.replace(" ", "").split(",") if device]
    # Importing torch takes seconds.
    import torch

    return [str(device) for device in range(torch.cuda.device_count())]
