"""How a job runs a command of a user.

The command runs in a folder with copies of the files that the config names, in an environment whose
HOME, caches and temporary files are folders of the job.

Standard library only.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from snakechat.workflow.commands import (
    check_lock,
    command_words,
    read_interpreter,
    unnamed_file,
)
from snakechat.workflow.digests import planned_files
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job
from snakechat.workflow.processes import FORWARDED, child_process, exit_code

# The names in braces of the models and of the data that a job reads, by the start of its inputs.
INPUTS = {
    "model": ("model", "reference"),
    "actor": ("model", "reference"),
    "teacher": ("teacher",),
    "reward": ("reward",),
    "data": ("data",),
    "tokens": ("tokens",),
}
# Variables that would change which modules Python finds, or that belong to our own programs.
REMOVED = ("PYTHON", "VIRTUAL_ENV", "SNAKECHAT_", "RANK")
# Bytes of the output that are searched for what went wrong.
TAIL = 1 << 14


def run_command(job: Job[Any], output: Path) -> None:
    """Run the command of a job, which fills an output folder.

    Raises:
        InputError: The interpreter or a file is not what was planned, or the command failed.
    """
    settings, root = job.settings, Path(job.options.source)
    python = os.path.abspath(job.options.python or sys.executable)
    if hasattr(settings, "python"):
        job.record["versions"] = check_interpreter(python, settings, root)
    values = {
        name: os.path.abspath(path)
        for key, path in job.inputs.items()
        for name in INPUTS[key.partition(".")[0]]
    }
    values |= {
        "python": python,
        "output": os.path.abspath(output),
        "state": os.path.abspath(job.states),
        "log_dir": os.path.abspath(job.log_folder),
        "seed": str(getattr(settings, "seed", "")),
        "gpus": str(job.placement.gpus_per_node),
    }
    files = {root / name: digest for name, digest in job.spec["files"].items()}
    elsewhere = {path: files[path] for path in files if is_elsewhere(path, root)}
    with tempfile.TemporaryDirectory(prefix="command-") as name:
        folder = Path(name)
        copy = copy_files(root, files, folder / "files")
        network = getattr(settings, "network", False)
        environment = command_environment(os.environ, folder, python, network)
        with planned_files(elsewhere):
            try:
                code, tail = run_words(command_words(settings.command, values), copy, environment)
            except OSError as error:
                raise InputError(
                    f"{job.target}: the command cannot run {error.filename}: {error.strerror}"
                ) from None
        unnamed = unnamed_file(tail, root, copy) if code else None
    job.record["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    if code in [128 + number for number in FORWARDED]:
        sys.exit(code)
    if unnamed:
        raise InputError(f"{job.target}: the command cannot read {unnamed}: add it to `files`")
    if code:
        reason = next((line for line in reversed(tail.splitlines()) if line.strip()), "no output")
        raise InputError(f"{job.target}: the command ended with exit code {code}: {reason.strip()}")


def check_interpreter(python: str, settings: Any, root: Path) -> dict[str, str]:
    """Check that an interpreter is what was planned; return the versions of its distributions.

    Raises:
        InputError: They are not, or the environment has other versions than its lock.
    """
    found = read_interpreter(python)
    if hasattr(settings, "lock"):
        check_lock(root / settings.lock, found.distributions)
    for what, now, planned in (
        ("version", found.version, settings.python),
        ("packages", found.distributions, getattr(settings, "distributions", found.distributions)),
    ):
        if now != planned:
            raise InputError(
                f"{python}: its {what} changed since this build was planned: start it again"
            )
    return found.distributions


def copy_files(root: Path, digests: Mapping[Path, str], folder: Path) -> Path:
    """Copy the files below a root that a recipe names; return the folder of the copies.

    Edits of the files while the command runs do not reach it. Files elsewhere are not copied.

    Raises:
        InputError: A file is not what was planned.
    """
    folder.mkdir()
    with planned_files(digests):
        for path in digests:
            if not is_elsewhere(path, root):
                target = folder / path.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
    return folder


def is_elsewhere(path: Path, root: Path) -> bool:
    """Return whether the path of a file leads out of a root."""
    return path.relative_to(root).parts[0] == ".."


def command_environment(
    variables: Mapping[str, str], folder: Path, python: str, network: bool
) -> dict[str, str]:
    """Return the variables of a command.

    Args:
        variables: Those of this process.
        folder: Folder for what the command keeps for itself.
        python: Its interpreter, whose programs are found first.
        network: Whether it uses the cache of the Hub.
    """
    kept = {name: text for name, text in variables.items() if not name.startswith(REMOVED)}
    folders = {"HOME": "home", "XDG_CACHE_HOME": "cache", "TMPDIR": "tmp"}
    folders |= {} if network else {"HF_HOME": "hub"}
    for name, inner in folders.items():
        (folder / inner).mkdir()
        kept[name] = str(folder / inner)
    path = f"{os.path.dirname(python)}{os.pathsep}{kept.get('PATH', os.defpath)}"
    offline = {} if network else {"HF_HUB_OFFLINE": "1"}
    return {**kept, **offline, "PATH": path, "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}


def run_words(
    words: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Run a command in a folder; return its exit code and the end of its output.

    It gets the signals that ask this process to stop, and ends with it.

    Raises:
        OSError: The program cannot be started.
    """
    tail = bytearray()

    def show(output: int) -> None:
        while chunk := os.read(output, TAIL):
            os.write(sys.stdout.fileno(), chunk)
            tail.extend(chunk)
            del tail[:-TAIL]

    with child_process(
        words,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as (process, received):
        assert process.stdout
        # What the command left running may keep its output open.
        reader = threading.Thread(target=show, args=[process.stdout.fileno()], daemon=True)
        reader.start()
        code = process.wait()
        reader.join(timeout=5)
    if received and code:
        return 128 + received[0], tail.decode(errors="replace")
    return exit_code(process), tail.decode(errors="replace")
