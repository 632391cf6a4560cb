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
from contextlib import suppress
from functools import cache
from pathlib import Path

from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import FileDigests, digest, file_digests

LOCK = Path(__file__).resolve().parents[3] / "requirements.txt"
# Beside every lock: torch, and its libraries for CUDA.
TORCH_LOCK = "requirements-torch.txt"

# The name of Python's own version among the pins.
PYTHON = "python"

# Distributions whose modules have other names, as far as our programs import them.
DISTRIBUTIONS = {"yaml": "pyyaml"}

# Distributions that change no result; nor does what only they require.
WITHOUT_EFFECT = {
    # Progress, curves and command lines.
    *("tqdm", "tensorboard", "rich", "typer", "click"),
    # Transfers and locks: what arrives counts by its digest.
    *("httpx2", "openai", "requests", "fsspec", "filelock"),
    # Information about the machine, and build tools.
    *("psutil", "py-cpuinfo", "ninja", "setuptools"),
    # Checks of settings.
    "pydantic",
    # The workflow itself.
    "snakemake",
}

# Distributions that change no result of a program unless it imports them itself: what others use to
# read their configuration, to compile graphs and to render templates.
WITHOUT_EFFECT_BEHIND_OTHERS = {"jinja2", "hjson", "msgpack", "networkx"}

BLOCK = re.compile(r"^([a-z0-9][\w.-]*)==([\w.!+]+)(.*)\n((?:[ \t]+.*\n?)*)", re.MULTILINE)
VIA = re.compile(r"^ +# +(?:via +)?([a-z0-9][\w.-]*)$", re.MULTILINE)
# What a pin by files has before their digest.
FILES = "(files "


def pins_of(
    imports: Iterable[str], lock: Path = LOCK, digests: FileDigests = file_digests
) -> dict[str, str]:
    """Return the versions that a program's results depend on, by distribution, in order.

    Python counts by its minor version: its `sum` and `random`, for example, differ between them.

    A library that is not locked counts by its files, by the name of its module, and so does each
    library that it requires: a library that a reward function imports, or an optional one. It does
    not count if it is not installed.

    imports: Top-level names of the modules that the program imports.
    lock: The lock of the program's environment.
    """
    versions, requires = read_lock(lock)
    pins = {PYTHON: python_version()}
    modules, locked = list(imports), list[str]()
    while modules:
        module = modules.pop()
        name = distribution(module)
        if name in versions or name in WITHOUT_EFFECT:
            locked.append(name)
        elif module not in pins and importlib.util.find_spec(module):
            providers = _providers(module)
            unlocked = [name for name in providers if name not in versions]
            locked += providers
            if unlocked or not providers:
                pins[module] = files_pin(module, digests)
            lines = [line for name in unlocked for line in importlib.metadata.requires(name) or ()]
            # Without what only their extras require.
            for line in (line for line in lines if "extra ==" not in line):
                name = normalized(re.split(r"[^\w.-]", line)[0])
                of_name = [module for module in _distributions() if name in _providers(module)]
                modules += [name] if name in versions else of_name
    while locked:
        name = locked.pop()
        if name in versions and name not in pins and name not in WITHOUT_EFFECT:
            pins[name] = versions[name]
            locked += requires.get(name, set()) - WITHOUT_EFFECT_BEHIND_OTHERS
    return dict(sorted(pins.items()))


def files_pin(module: str, digests: FileDigests = file_digests) -> str:
    """Return the version of a library that is not locked and the digest of its files."""
    found = importlib.util.find_spec(module)
    assert found is not None
    names = {
        path: path.relative_to(folder).as_posix()
        for folder in found.submodule_search_locations or ()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and path.parent.name != "__pycache__"
    }
    origin = Path(found.origin or "")
    # A module that is built in has no file.
    if not found.submodule_search_locations and origin.is_file():
        names = {origin: "."}
    files = [[names[path], value] for path, value in digests(names).items()]
    versions = installed_versions(_providers(module)).values()
    return f"{' '.join(versions)} {FILES}{digest(files)[:16]})".lstrip()


def check_installed(pins: Mapping[str, str]) -> None:
    """Raise InputError unless the installed versions are those that a result is keyed by.

    The build of a version does not matter: 2.13.0+cpu is 2.13.0.
    """
    versions = {**installed_versions(pins), PYTHON: python_version()}
    # Python and torch decide about many others.
    for name in sorted(pins, key=lambda name: name not in (PYTHON, "torch")):
        by_files = FILES in pins[name] and importlib.util.find_spec(name)
        installed = files_pin(name) if by_files else versions.get(name)
        if public(installed) != public(pins[name]):
            raise InputError(
                f"{name} {f'{installed} is' if installed else 'is not'} installed, and this build"
                f" was planned with {pins[name]}: install it (pip install --no-deps --requirement"
                f" {LOCK.name} --requirement {TORCH_LOCK}), or start again"
            )


def python_version() -> str:
    """Return the minor version of the Python that runs, such as 3.11."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed, by name."""
    versions = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@cache
def read_lock(path: Path) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Return the content of a lock and of the torch lock in the same folder.

    They are locked versions by distribution, without those that only some platforms or versions of
    Python need, so that pins are the same on every machine; and direct requirements by
    distribution. Raises InputError if a lock has no comments on what requires what.
    """
    versions, requires = dict[str, str](), dict[str, set[str]]()
    for part in (path, path.with_name(TORCH_LOCK)):
        for name, version, marker, lines in BLOCK.findall(part.read_text(encoding="utf-8")):
            if ";" not in marker:
                versions[name] = version
            if "# via" not in lines:
                raise InputError(f"{part} does not say what requires {name}: run `make lock`")
            for parent in VIA.findall(lines):
                requires.setdefault(parent, set()).add(name)
    return versions, requires


def distribution(module: str) -> str:
    """Return the normalized name of the distribution that a module is named after."""
    return DISTRIBUTIONS.get(module, normalized(module))


def normalized(name: str) -> str:
    """Return the normalized name of a distribution: Jinja2 is jinja2, my_lib is my-lib."""
    return re.sub(r"[-_.]+", "-", name).lower()


def public(version: str | None) -> str | None:
    """Return a version without its build, such as +cpu."""
    return version and version.partition("+")[0]


def _providers(module: str) -> list[str]:
    """Return the distributions that provide a module; none of a loose file."""
    return sorted({normalized(name) for name in _distributions().get(module, ())})


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the installed distributions by the modules that they provide, in half a second."""
    return importlib.metadata.packages_distributions()
