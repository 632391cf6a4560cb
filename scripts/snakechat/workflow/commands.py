"""Commands of users, in place of our trainers and as benchmarks.

A command runs in a folder with copies of the files that the config names, in an environment whose
HOME, caches and temporary files are folders of the job.

Standard library only: the workflow imports this module while it plans.
"""

import glob
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.workflow.digests import planned_files
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job
from snakechat.workflow.pins import normalized, public
from snakechat.workflow.processes import FORWARDED, child_process, exit_code

# A name in braces, a brace that is doubled, or a single one.
BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
# What an interpreter says of itself. Folders that .pth files add are not in its environment.
QUERY = """
import json, platform, sys
from importlib.metadata import distributions
print(json.dumps({
    "version": platform.python_version(),
    "distributions": {each.name: each.version for each in [*distributions()][::-1] if each.name},
    "folders": sorted({sys.prefix, sys.base_prefix, sys.exec_prefix}),
}))
"""
# A pin in a lock or in a list of requirements.
PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[^]]*\])?==([\w.!+-]+)", re.MULTILINE)


# --- words ------------------------------------------------------------------------------------


def command_words(command: str, values: Mapping[str, str]) -> list[str]:
    """Return the words of a command, in which values replace names in braces. There is no shell.

    {{ and }} are single braces.

    Raises:
        ValueError: A quote is not closed, or braces have another name.
    """

    def replaced(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        if match[1] not in values:
            names = ", ".join(f"{{{name}}}" for name in values)
            raise ValueError(f"{match[0]} is unknown: expected {names}, or doubled braces")
        return values[match[1]]

    words = [BRACES.sub(replaced, word) for word in shlex.split(command)]
    if not words:
        raise ValueError("expected a program and its arguments")
    return words


def names_in(command: str) -> set[str]:
    """Return the names in braces of a command."""
    return {match[1] for match in BRACES.finditer(command) if match[1]}


# --- the interpreter --------------------------------------------------------------------------


class Interpreter(NamedTuple):
    """An interpreter of Python and its environment.

    Attributes:
        version: Its version.
        distributions: Versions of the installed distributions, by normalized name.
        folders: Folders of the environment and of Python itself.
    """

    version: str
    distributions: dict[str, str]
    folders: list[str]


@cache
def read_interpreter(python: str) -> Interpreter:
    """Return what an interpreter says of itself.

    Raises:
        InputError: It does not exist, or is not Python.
    """
    if not os.path.exists(python):
        raise InputError(f"{python} does not exist: create the environment, or correct the path")
    try:
        done = subprocess.run([python, "-I", "-c", QUERY], capture_output=True, timeout=60)
        found = json.loads(done.stdout)
        versions = found["distributions"].items()
        distributions = {normalized(name): each for name, each in versions}
        return Interpreter(found["version"], dict(sorted(distributions.items())), found["folders"])
    except (OSError, ValueError, subprocess.TimeoutExpired):
        raise InputError(f"{python} is not an interpreter of Python: correct the path") from None


def check_lock(lock: Path, installed: Mapping[str, str]) -> None:
    """Check that an environment has the versions of a lock, of the distributions that it has.

    Raises:
        InputError: It has others, or none of them.
    """
    pins = {
        normalized(name): version for name, version in PIN.findall(lock.read_text(encoding="utf-8"))
    }
    if not pins:
        raise InputError(f"{lock} pins no version: write NAME==VERSION, as pip freeze does")
    for name, version in pins.items():
        # Packages of other platforms are not installed.
        found = public(installed.get(name, version))
        if found != public(version):
            raise InputError(
                f"{name} {found} is installed, and {lock} has {version}: install the lock"
            )
    if pins.keys().isdisjoint(installed):
        raise InputError(f"{lock}: nothing of it is installed in the environment: install it")


# --- files ------------------------------------------------------------------------------------


def named_files(root: Path, patterns: Sequence[str]) -> Iterator[str]:
    """Yield the files that paths, folders and globs name, as paths relative to a root.

    Raises:
        InputError: One of them names no file.
    """
    for pattern in patterns:
        found = [str(root / pattern)]
        if not os.path.exists(found[0]):
            found = glob.glob(os.path.join(glob.escape(str(root)), pattern), recursive=True)
        files = [file for path in sorted(found) for file in _files(path)]
        if not files:
            raise InputError(f"{pattern}: there is no such file: correct the path, or remove it")
        yield from (os.path.relpath(file, root) for file in files)


def _files(path: str) -> list[str]:
    """Return a file, or the files of a folder, without hidden ones and bytecode."""
    if not os.path.isdir(path):
        return [path]
    found = []
    for parent, folders, files in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        found += [os.path.join(parent, name) for name in files if not name.startswith(".")]
    return sorted(found)


# --- the run ----------------------------------------------------------------------------------

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
# Bytes of the end of the output, whose last line is the error.
TAIL = 1 << 14
# How programs report a file that they may not read, or that is not in their folder.
UNREAD = re.compile("Permission denied|No such file or directory|ModuleNotFoundError")


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
    job.record["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    if code in [128 + number for number in FORWARDED]:
        sys.exit(code)
    if code:
        reason = next((line for line in reversed(tail.splitlines()) if line.strip()), "no output")
        advice = ": add the files that it reads to `files`" if UNREAD.search(reason) else ""
        raise InputError(
            f"{job.target}: the command ended with exit code {code}: {reason.strip()}{advice}"
        )


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
