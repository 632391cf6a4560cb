"""Pins: the versions of Python and libraries that a result depends on, and of what is installed.

The locks have the version of each distribution and, in comments, what requires it. A program is
keyed by the versions of what it imports and of all that this requires.

Standard library only: the workflow imports this module while it plans.
"""

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from snakechat.workflow.errors import InputError

LOCK = Path(__file__).resolve().parents[3] / "requirements.txt"
# Beside every lock: torch, and its libraries for CUDA.
TORCH_LOCK = "requirements-torch.txt"
# The lock of lm-evaluation-harness, whose environment is its own, and its distribution.
LM_EVAL_LOCK, LM_EVAL = "requirements-lm-eval.txt", "lm-eval"

# The name of Python's own version among the pins.
PYTHON = "python"

# Distributions whose modules have other names, as far as our programs import them.
DISTRIBUTIONS = {"yaml": "pyyaml"}

# Distributions that change no result; nor does what only they require.
WITHOUT_EFFECT = frozenset(
    {
        # Progress, curves and command lines.
        *("tqdm", "tensorboard", "rich", "typer", "click"),
        # Transfers and locks: what arrives counts by its digest.
        *("httpx2", "requests", "fsspec", "filelock"),
        # Information about the machine, and build tools.
        *("psutil", "py-cpuinfo", "ninja", "setuptools"),
        # The workflow itself.
        "snakemake",
    }
)

BLOCK = re.compile(r"^([a-z0-9][\w.-]*)==([\w.!+]+)(.*)\n((?:[ \t]+.*\n?)*)", re.MULTILINE)
VIA = re.compile(r"^ +# +(?:via +)?([a-z0-9][\w.-]*)$", re.MULTILINE)


class Lock(NamedTuple):
    """The content of a lock.

    Attributes:
        versions: Locked versions by distribution. Those that only some platforms or versions of
            Python need are omitted, so that pins are the same on every machine.
        requires: Direct requirements by distribution.
    """

    versions: dict[str, str]
    requires: dict[str, list[str]]


def pins_of(imports: Iterable[str], lock: Path = LOCK) -> dict[str, str]:
    """Return the versions that a program's results depend on, by distribution, in order.

    Python counts by its minor version: its `sum` and `random`, for example, differ between them.

    A library that is not locked counts by its installed version, or not at all if it is not
    installed: a library that a reward function imports, or an optional one.

    Args:
        imports: Top-level names of the modules that the program imports.
        lock: The lock of the program's environment.

    Raises:
        InputError: A lock is missing or has no comments on what requires what.
    """
    versions, requires = read_lock(lock)
    pins = {PYTHON: python_version()}
    pending = []
    for module in imports:
        name = distribution(module)
        if name in versions or name in WITHOUT_EFFECT:
            pending.append(name)
            continue
        for name, version in _installed(module).items():
            if name in versions:
                pending.append(name)
            else:
                pins[name] = version
    while pending:
        name = pending.pop()
        if name in versions and name not in pins and name not in WITHOUT_EFFECT:
            pins[name] = versions[name]
            pending += requires.get(name, ())
    return dict(sorted(pins.items()))


def check_installed(pins: Mapping[str, str]) -> None:
    """Check that the installed versions are those that a result is keyed by.

    The build of a version does not matter: 2.13.0+cpu is 2.13.0.

    Raises:
        InputError: Versions differ, or distributions are missing.
    """
    installed = installed_versions(pins)
    different = [name for name in pins if _public(installed.get(name)) != _public(pins[name])]
    if not different:
        return
    if PYTHON in different:
        raise InputError(
            f"Python {python_version()} runs, and this build was planned with Python"
            f" {pins[PYTHON]}: use the environment that Snakemake runs in"
        )
    # torch decides about many others.
    name = "torch" if "torch" in different else different[0]
    found = f"{installed[name]} is installed" if name in installed else "is not installed"
    line = f"{name} {found}, and this build was planned with {pins[name]}"
    if len(different) > 1:
        line += f" ({len(different) - 1} more differ)"
    lock = LM_EVAL_LOCK if LM_EVAL in pins else LOCK.name
    commands = []
    if different != ["torch"]:
        commands.append(f"pip install --no-deps --requirement {lock}")
    if "torch" in different:
        commands.append(f"pip install torch=={pins['torch']}")
    raise InputError(f"{line}: {' && '.join(commands)}")


def python_version() -> str:
    """Return the minor version of the Python that runs, such as 3.11."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed, by name."""
    versions = {}
    for name in names:
        if name == PYTHON:
            versions[name] = python_version()
            continue
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@cache
def read_lock(path: Path) -> Lock:
    """Return the content of a lock and of the torch lock in the same folder.

    Raises:
        InputError: One of them is missing or has no comments on what requires what.
    """
    lock = Lock({}, {})
    for part in (path, path.with_name(TORCH_LOCK)):
        try:
            text = part.read_text(encoding="utf-8")
        except OSError as error:
            raise InputError(f"{part}: {error.strerror}") from None
        for name, version, marker, lines in BLOCK.findall(text):
            if ";" not in marker:
                lock.versions[name] = version
            if "# via" not in lines:
                raise InputError(f"{part} does not say what requires {name}: run `make lock`")
            for parent in VIA.findall(lines):
                lock.requires.setdefault(parent, []).append(name)
    return lock


def distribution(module: str) -> str:
    """Return the normalized name of the distribution that a module is named after."""
    return DISTRIBUTIONS.get(module, _normalized(module))


def _normalized(name: str) -> str:
    """Return the normalized name of a distribution: Jinja2 is jinja2, lm_eval is lm-eval."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _public(version: str | None) -> str | None:
    """Return a version without its build, such as +cpu."""
    return version and version.partition("+")[0]


@cache
def _installed(module: str) -> dict[str, str]:
    """Return the installed versions of the distributions that provide a module."""
    # Distributions are listed only for modules that exist: it takes half a second.
    if importlib.util.find_spec(module) is None:
        return {}
    names = importlib.metadata.packages_distributions().get(module, ())
    return installed_versions(map(_normalized, names))
