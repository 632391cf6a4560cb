"""Commands of users, in place of our trainers and as benchmarks: their words, and what they run in.

Standard library only: the workflow imports this module while it plans.
"""

import glob
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from snakechat.workflow.errors import InputError

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
# How programs report a file that they may not read, or that is not in their folder.
UNREAD = re.compile(r"Permission denied|No such file or directory|ModuleNotFoundError")
MODULE = re.compile(r"No module named '(\w+)")
PATH = re.compile(r"'([^'\n]+)'|([^\s'\"`:,;()\[\]]+)")


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
        distributions = {re.sub(r"[-_.]+", "-", name).lower(): each for name, each in versions}
        return Interpreter(found["version"], dict(sorted(distributions.items())), found["folders"])
    except (OSError, ValueError, subprocess.TimeoutExpired):
        raise InputError(f"{python} is not an interpreter of Python: correct the path") from None


def check_lock(lock: Path, installed: Mapping[str, str]) -> None:
    """Check that an environment has the versions of a lock, of the distributions that it has.

    Raises:
        InputError: It has others, or none of them.
    """
    pins = {
        re.sub(r"[-_.]+", "-", name).lower(): version
        for name, version in PIN.findall(lock.read_text(encoding="utf-8"))
    }
    if not pins:
        raise InputError(f"{lock} pins no version: write NAME==VERSION, as pip freeze does")
    for name, version in pins.items():
        # Packages of other platforms are not installed. A build, such as +cpu, does not matter.
        found = installed.get(name, version).partition("+")[0]
        if found != version.partition("+")[0]:
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


def unnamed_file(output: str, root: Path, copy: Path) -> str | None:
    """Return a file that a command failed to read because its recipe does not name it, or None.

    Args:
        output: The last lines that the command printed.
        root: The folder that the named files are relative to.
        copy: The folder of the named files in which the command ran.
    """
    folders = [path.relative_to(copy) for path in copy.rglob("*") if path.is_dir()]
    for line in reversed(output.splitlines()):
        if not UNREAD.search(line):
            continue
        modules = [f"{name}.py" for name in MODULE.findall(line)]
        names = [str(folder / name) for name in modules for folder in (Path(), *folders)]
        for name in [*names, *(quoted or word for quoted, word in PATH.findall(line))]:
            if (root / name).is_file() and not _is_readable(copy / name):
                return os.path.relpath(root / name, root)
    return None


def _is_readable(path: Path) -> bool:
    try:
        path.open("rb").close()
    except OSError:
        return False
    return True
