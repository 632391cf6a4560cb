"""Start a program in several processes on this machine."""

import os
import subprocess

from conftest import ROOT

LAUNCHER = ROOT / "scripts/launch.py"


def launch(
    number, program, *arguments, launcher=LAUNCHER, folder=None, device="cpu", **environment
):
    """Start a program in a number of processes; return the launcher, whose output is text.

    number: None if the placement sets it. device: cpu or cuda. environment: Further variables.
    """
    group = ["--standalone", f"--nproc-per-node={number}"] if number else []
    command = [ROOT / "tests/bin/python", launcher, *group, program, *arguments]
    return subprocess.Popen(
        [*map(str, command)],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": device,
            # An option of torchrun that torch 2.11 does not have.
            "PET_SHUTDOWN_TIMEOUT": "60",
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(*arguments, timeout=600, **named):
    """Launch a program; return its exit code and its output. Raises TimeoutExpired."""
    process = launch(*arguments, **named)
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, output
