"""Pins of programs: which changes of a lock count, and the check of what is installed."""

import importlib.metadata
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement

from conftest import ROOT
from snakechat.workflow import pins
from snakechat.workflow.code_digests import Modules
from snakechat.workflow.errors import InputError
from snakechat.workflow.pins import (
    DISTRIBUTIONS,
    LOCK,
    PYTHON,
    TORCH_LOCK,
    WITHOUT_EFFECT,
    check_installed,
    distribution,
    pins_of,
    python_version,
    read_lock,
)

# What each line of a lock requires the next one by.
TEXT, TORCH = (
    "# A comment.\n"
    + "".join(
        f"{pin} \\\n    --hash=sha256:00\n    # via\n"
        + "".join(f"    #   {parent}\n" for parent in parents.split())
        for pin, parents in pins.items()
    )
    for pins in (
        {
            "jinja2==3.1.6": "torch",
            "markupsafe==3.0.4": "jinja2",
            "numpy==2.4.6": "tensorboard",
            "pyyaml==6.0.3": "transformers",
            "tensorboard==2.21.0": "nothing",
        },
        {"nvidia-nccl-cu13==2.29.7 ; sys_platform == 'linux'": "torch", "torch==2.13.0": "nothing"},
    )
)


@pytest.fixture
def lock(tmp_path):
    """A small lock."""
    (tmp_path / "requirements.txt").write_text(TEXT)
    (tmp_path / TORCH_LOCK).write_text(TORCH)
    return tmp_path / "requirements.txt"


@pytest.mark.parametrize(
    "imports, expected",
    [
        (("yaml",), {"pyyaml": "6.0.3"}),
        # It renders templates by it, which no model does.
        (("torch",), {"torch": "2.13.0"}),
        (("jinja2",), {"jinja2": "3.1.6", "markupsafe": "3.0.4"}),
        # It only displays, and nothing else requires NumPy.
        (("tensorboard",), {}),
        # A module of torch, and one that is neither locked nor installed.
        (("torchgen", "nowhere_at_all"), {"torch": "2.13.0"}),
    ],
)
def test_pins_are_those_of_imports_and_of_what_they_require(lock, imports, expected):
    found = pins_of(imports, lock)
    assert found == {PYTHON: python_version(), **expected}
    assert list(found) == sorted(found)


def test_the_minor_version_of_python_counts_and_is_checked(lock, monkeypatch):
    before = pins_of(["numpy"], lock)
    monkeypatch.setattr(sys, "version_info", SimpleNamespace(major=3, minor=99))
    assert pins_of(["numpy"], lock) == {"numpy": "2.4.6", "python": "3.99"} != before
    with pytest.raises(InputError, match=r"^python 3.99 is installed, and this build"):
        check_installed({**before, "numpy": importlib.metadata.version("numpy")})


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed modules: `loose` without a distribution, `mine`, which requires `other`
    and numpy, `other`, and `extra`, which only an extra of `mine` requires.
    """
    folder = tmp_path / "site"
    texts = dict.fromkeys(("loose.py", "mine/words.txt", "mine/__pycache__/old.pyc"), "")
    requires = {"mine": ("My.Other>=1", "numpy", "extra ; extra == 'all'")}
    for name in ("mine", "my_other", "extra"):
        lines = "".join(f"Requires-Dist: {each}\n" for each in requires.get(name, ()))
        texts[f"{name}/__init__.py"] = "A = 1\n"
        texts[f"{name}-1.0.dist-info/METADATA"] = f"Name: {name}\nVersion: 1.0\n{lines}"
        texts[f"{name}-1.0.dist-info/top_level.txt"] = f"{name}\n"
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(folder)
    pins._distributions.cache_clear()
    yield folder
    pins._distributions.cache_clear()


def test_a_library_that_is_not_locked_counts_by_its_files_and_so_does_what_it_requires(lock, site):
    found = pins_of(["mine", "loose"], lock)
    assert found.keys() == {"loose", "mine", "my_other", "numpy", "python"}
    assert re.fullmatch(r"1\.0 \(files [0-9a-f]{16}\)", found["mine"])
    assert re.fullmatch(r"\(files [0-9a-f]{16}\)", found["loose"])
    for name, changed in {
        "loose.py": "loose",
        "mine/words.txt": "mine",
        "my_other/__init__.py": "my_other",
        "mine/__pycache__/old.pyc": None,
        "extra/__init__.py": None,
    }.items():
        (site / name).write_text("edited\n")
        after = pins_of(["mine", "loose"], lock)
        assert {name for name in found if found[name] != after[name]} == {changed} - {None}
        # What changes after a build was planned is an error of its jobs.
        planned = {name: pin for name, pin in found.items() if name != "numpy"}
        found = after
        error = pytest.raises(InputError, match=rf"^{changed} .*\(files .*: install it")
        with error if changed else nullcontext():
            check_installed(planned)


def test_a_lock_without_comments_and_a_missing_one_are_rejected(lock):
    lock.write_text("numpy==2.4.6 \\\n    --hash=sha256:03\n")
    with pytest.raises(InputError, match=r"does not say what requires numpy: run `make lock`"):
        pins_of(["numpy"], lock)
    (lock.parent / TORCH_LOCK).unlink()
    lock.write_text("")
    with pytest.raises(FileNotFoundError, match=r"requirements-torch\.txt"):
        pins_of(["numpy"], lock)


def test_versions_that_differ_are_reported_with_the_command_that_installs_them(monkeypatch):
    with pytest.raises(InputError, match=r"^nowhere is not installed, and .* with 1: install"):
        check_installed({"nowhere": "1"})
    planned = {"numpy": "2.4.6", "torch": "2.13.0", "transformers": "5.23.0"}
    # The build of a version does not matter.
    installed = {**planned, "torch": "2.13.0+cu130"}
    monkeypatch.setattr(pins.importlib.metadata, "version", lambda name: installed[name])
    check_installed(planned)
    installed |= {"numpy": "2.4.5", "torch": "2.12.0"}
    line = r"^torch 2\.12\.0 is installed, and this build was planned with 2\.13\.0: install it"
    with pytest.raises(InputError, match=line):
        check_installed(planned)


def test_every_direct_requirement_is_locked_at_a_version_that_satisfies_it():
    for name in ("requirements", "requirements-kubernetes", "requirements-test"):
        versions, _ = read_lock(ROOT / f"{name}.txt")
        lines = (ROOT / f"{name}.in").read_text().splitlines()
        for requirement in (Requirement(line) for line in lines if line and line[0] not in "#-"):
            version = versions[distribution(requirement.name)]
            assert requirement.specifier.contains(version), requirement


def test_every_library_that_a_program_imports_is_locked():
    modules = Modules(ROOT / "scripts")
    programs = [modules.code(path.stem).imports for path in modules.scripts.glob("*.py")]
    # That of Kubernetes has a lock of its own.
    imported = set().union(*programs) - {"kubernetes"}
    versions, _ = read_lock(LOCK)
    distributions = importlib.metadata.packages_distributions()
    for module in imported:
        assert distribution(module) in versions
        assert distribution(module) in map(distribution, distributions[module])
    assert set(DISTRIBUTIONS) <= imported
    assert versions.keys() >= WITHOUT_EFFECT


def test_the_conda_environment_has_the_locks_and_no_path():
    """Conda reads a copy of the file, in a folder that depends on --conda-prefix."""
    packages = yaml.safe_load((ROOT / "envs/snakechat.yaml").read_text())["dependencies"][-1]["pip"]
    locks = "".join((ROOT / name).read_text() for name in (LOCK.name, TORCH_LOCK))
    assert [line.split()[0] for line in packages] == re.findall(r"(?m)^[a-z0-9]\S+", locks)
    assert " ".join(packages).count("--hash=") == locks.count("--hash=")
