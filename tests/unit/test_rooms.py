"""The package's rooms: imports point downwards only."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT

PACKAGE = ROOT / "scripts/snakechat"
# From the lowest: a module imports from its own room and from those before it.
ROOMS = (
    "workflow",
    "data",
    "config",
    "jobs",
    "modeling",
    "training",
    "algorithms",
    "evaluation",
    "planning",
    "reporting",
    "rules",
)


def imported_rooms(source: str) -> Iterator[str]:
    """Yield the room of each import from the package, in any form."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "snakechat" and rest:
                yield rest.partition(".")[0]


def upward_imports(source: str, room: str) -> set[str]:
    """Return the rooms above `room` that a module imports from."""
    above = ROOMS[ROOMS.index(room) + 1 :]
    return set(above).intersection(imported_rooms(source))


def test_each_folder_of_the_package_is_a_room():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders <= set(ROOMS)
    assert [path.name for path in PACKAGE.glob("*.py")] == ["__init__.py"]


@pytest.mark.parametrize(
    "path",
    sorted(PACKAGE.glob("*/*.py")),
    ids=lambda path: path.relative_to(PACKAGE).as_posix(),
)
def test_imports_point_downwards(path: Path):
    assert not upward_imports(path.read_text(), path.parent.name)


@pytest.mark.parametrize(
    "line",
    [
        "from snakechat.training.engine import Engine",
        "from snakechat.training import engine",
        "from snakechat import training",
        "import snakechat.training.engine as engine",
        "def late():\n    from snakechat.training import engine\n",
    ],
)
def test_upward_imports_of_every_form_are_found(line: str):
    assert upward_imports(line, "data") == {"training"}
    assert upward_imports(line, "training") == set()
    assert upward_imports(line, "algorithms") == set()
