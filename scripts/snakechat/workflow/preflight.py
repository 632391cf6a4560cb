"""A check before the first job of a build, which costs less than finding the mistake in a job.

Standard library only: the workflow imports this module while it plans.
"""

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from snakechat.workflow.errors import InputError

PROGRAM = "snakechat.algorithms.reward_functions"


def import_reward_functions(sources: Path, names: Collection[str]) -> None:
    """Import reward functions in a process of its own, as jobs will.

    Args:
        sources: Folder of scripts/ and rewards/.
        names: Names of the files in rewards/.

    Raises:
        InputError: One of them cannot be imported.
    """
    if not names:
        return
    process = subprocess.run(
        [sys.executable, "-m", PROGRAM, *sorted(names)],
        env={**os.environ, "PYTHONPATH": str(sources.absolute() / "scripts")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if process.returncode:
        lines = process.stdout.strip().splitlines() or [f"exit code {process.returncode}"]
        raise InputError(lines[-1].removeprefix("error: "))
