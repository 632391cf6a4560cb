"""GPUs of this machine, one job to each: Snakemake counts them, and tells no job which are its own.

A job locks those that it takes, in a folder of the user's among the temporary files. The locks go
with its process, however that ends.
"""

import fcntl
import os
import tempfile
from pathlib import Path


class Busy(Exception):
    """Too few GPUs are free: text says how many, and what to do."""


def take(number):
    """Leave so many GPUs to this process, and to those that it becomes or starts: theirs alone.

    Sets CUDA_VISIBLE_DEVICES. Raises Busy if other jobs have too many. Does nothing where there are
    fewer at all: the program that needs them says so.
    """
    devices = visible_devices()
    slurm_job = os.environ.get("SLURM_JOB_ID")
    # A Slurm job has its own. Several may share them in one that has more, an interactive one.
    if len(devices) < number or (slurm_job and len(devices) == number):
        return
    names = ["snakechat", str(os.getuid()), *([slurm_job] if slurm_job else [])]
    folder = Path(tempfile.gettempdir(), "-".join(names))
    folder.mkdir(mode=0o700, exist_ok=True)
    taken = []
    # One job chooses at a time: of two that had a part of what they need, none would start.
    with open(folder / "choice.lock", "w") as choice:
        fcntl.flock(choice, fcntl.LOCK_EX)
        for device in devices:
            if len(taken) < number and lock(folder / f"{device.replace('/', '-')}.lock"):
                taken.append(device)
    if len(taken) < number:
        raise Busy(
            f"{len(taken)} of {len(devices)} GPUs are free and this job needs {number}: tell"
            f" Snakemake how many there are, by --resources gpu={len(devices)}"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(taken)


def lock(path):
    """Lock a file for as long as this process lives, whatever it becomes; whether it can."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    os.set_inheritable(descriptor, True)
    return True


def visible_devices():
    """The GPUs that a user or a cluster leaves to this process, or all that there are."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [device for device in named.replace(" ", "").split(",") if device]
    # Only here: it takes seconds.
    import torch

    return [str(device) for device in range(torch.cuda.device_count())]
