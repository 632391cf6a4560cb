"""Checks before the first job of a build, which cost less than finding the mistake in a job.

Standard library only: the workflow imports this module while it plans.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path

from snakechat.workflow.code_digests import Modules
from snakechat.workflow.errors import InputError, warn
from snakechat.workflow.hermetic import Limits, hermetic_version, write_limits

PROGRAM = "snakechat/algorithms/reward_functions"


def check_gpus(recipes: Iterable[str]) -> None:
    """Raise InputError for the first of the recipes that need a GPU, unless torch finds one."""
    recipe = next(iter(recipes), None)
    if recipe is None:
        return
    # Importing torch takes seconds, and would stay in the process that plans.
    program = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", program], stderr=subprocess.DEVNULL).returncode:
        raise InputError(
            f"{recipe} needs a GPU, and this machine has none: add --config deployment=cpu to train"
            " on the CPU"
        )


def check_limits(mode: str) -> None:
    """Say once that jobs on this machine have no limits, if `hermetic: auto` cannot set them.

    Raises:
        InputError: As hermetic_version.
    """
    if not hermetic_version(mode) and mode != "off":
        warn(
            "the kernel has no Landlock, or a container denies it: jobs may read files that their"
            " results are not made from (hermetic: auto)"
        )


def import_reward_functions(sources: Path, names: Collection[str], mode: str) -> None:
    """Import reward functions in a process of its own, within limits as jobs will.

    Args:
        sources: Folder of scripts/ and rewards/.
        names: Names of the files in rewards/.
        mode: As of hermetic_version.

    Raises:
        InputError: One of them cannot be imported.
    """
    if not names:
        return
    modules = Modules(sources.absolute() / "scripts")
    folders = [str(modules.scripts), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        program = ["-m", PROGRAM.replace("/", ".")]
        if hermetic_version(mode):
            path = Path(folder, "limits.json")
            read = map(str, modules.files(PROGRAM, names))
            write_limits(Limits(read=[*read], folders=[*map(str, modules.folders)]), path)
            confined = modules.scripts / "confined.py"
            program = [str(confined), str(path), folder, str(modules.scripts / f"{PROGRAM}.py")]
        process = subprocess.run(
            [sys.executable, *program, *sorted(names)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    if process.returncode:
        lines = process.stdout.strip().splitlines() or [f"exit code {process.returncode}"]
        raise InputError(lines[-1].removeprefix("error: "))
