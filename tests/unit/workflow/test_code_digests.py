"""Digests of code: which edits change them."""

from functools import partial

import pytest

from snakechat.workflow.code_digests import code_digests, program_code
from support.sources import write_sources

SOURCE = '''"""A module."""

import math

LIMIT = 3


class Circle:
    """A circle."""

    def area(self, radius, scale=1.0):
        """Its area."""
        # Pi times the square.
        square = radius * radius
        area = math.pi * square
        return area * scale


async def wait(seconds=2):
    """Wait."""
    return "waited", seconds
'''


@pytest.fixture
def digest_of(tmp_path):
    def source(text):
        path = tmp_path / "module.py"
        path.write_text(text)
        return program_code(path).digests

    return source


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [
        ("# Pi times the square.", "# Another comment.", False),
        ('"""A module."""\n', "", False),
        ('"""A circle."""', '"""Another class."""', False),
        ('        """Its area."""\n', "", False),
        ('    """Wait."""\n', "", False),
        ("radius * radius", "(radius\n            * radius)  # wrapped", False),
        ("radius * radius", "radius + radius", True),
        ("LIMIT = 3", "LIMIT = 3.0", True),
        ("LIMIT = 3\n", "", True),
        ("scale=1.0", "*, scale=1.0", True),
        ("import math", "import cmath as math", True),
        ('"waited"', '"Waited"', True),
        ("seconds=2", "seconds=True", True),
    ],
)
def test_code_counts_and_comments_docstrings_and_layout_do_not(digest_of, old, new, counts):
    assert SOURCE.count(old) >= 1
    assert (digest_of(SOURCE.replace(old, new)) != digest_of(SOURCE)) == counts


@pytest.fixture
def write(tmp_path):
    """A function that writes files, by path, under a folder scripts/ and returns that folder."""
    return partial(write_sources, tmp_path / "scripts")


# program.py imports a and, through it, b; b and c import each other; only other.py imports d.
FLAT = {
    "program.py": "import json\n\nfrom pkg.a import one\n\none()\n",
    "other.py": "from pkg.d import one\n\none()\n",
    "pkg/__init__.py": "",
    "pkg/a.py": "import numpy\n\n\ndef one():\n    from pkg.b import two\n    return two\n",
    "pkg/b.py": "from pkg.c import three\n\ntwo = lambda: three\n",
    "pkg/c.py": "from pkg.b import two\n\nthree = 3\n",
    "pkg/d.py": "from pkg.a import one\n",
}
REACHED = ["pkg/__init__.py", "pkg/a.py", "pkg/b.py", "pkg/c.py"]


@pytest.fixture
def flat(write):
    return write(FLAT)


def test_an_edit_changes_the_digest_of_its_module_only(flat):
    before = code_digests(flat / "program.py")
    assert sorted(before) == sorted(["program.py", *REACHED])
    (flat / "pkg/c.py").write_text("from pkg.b import two\n\nthree = 4\n")
    after = code_digests(flat / "program.py")
    assert [name for name in before if before[name] != after[name]] == ["pkg/c.py"]


@pytest.mark.parametrize(
    "line",
    [
        "from pkg.a import one as first, one as second\nsecond",
        "from pkg.a import *",
        "from pkg import a as other\nother.one",
        "import pkg.a\npkg.a.one",
        "import json, pkg.a as other\nprint(other)",
        "def late():\n    from pkg import a\n    return a.one()\n",
        "if False:\n    from pkg.a import one\n",
        "import typing\nif typing.TYPE_CHECKING:\n    from pkg.a import one\n",
        "try:\n    from pkg.a import one\nexcept ImportError:\n    pass\none()\n",
    ],
)
def test_import_statements_of_every_form_are_followed(flat, line):
    (flat / "program.py").write_text(f"{line}\n")
    assert sorted(code_digests(flat / "program.py")) == sorted(["program.py", *REACHED])


@pytest.mark.parametrize(
    "line",
    [
        "import importlib\nimportlib.import_module('pkg' + '.a').one()\n",
        "from importlib import import_module as load\nload('pkg.a')\n",
        "__import__('pkg.a')\n",
        "import runpy\nrunpy.run_path('other.py')\n",
    ],
)
def test_an_import_by_a_name_that_is_made_at_run_time_counts_all_modules(flat, line):
    (flat / "program.py").write_text(f"{line}\n")
    assert code_digests(flat / "program.py").keys() == FLAT.keys()


@pytest.mark.parametrize(
    "line",
    [
        "TEXT = one.__doc__",
        "import inspect\nTEXT = inspect.getsource(one)",
        "from inspect import getdoc as read\nTEXT = read(one)",
        "LINE = one.__code__.co_firstlineno",
        "import linecache",
    ],
)
def test_a_module_that_reads_its_own_source_counts_with_comments_and_docstrings(flat, line):
    source = f'def one():\n    """Text."""\n\n\n{line}\n'
    (flat / "pkg/a.py").write_text(source)
    digests = {code_digests(flat / "program.py")["pkg/a.py"]}
    for edited in (source.replace("Text", "Another"), f"# Comment.\n{source}", f"\n{source}"):
        (flat / "pkg/a.py").write_text(edited)
        digests.add(code_digests(flat / "program.py")["pkg/a.py"])
    assert len(digests) == 4


def test_comments_count_in_a_reward_function_that_may_open_its_own_file(flat):
    reward = flat.with_name("rewards") / "mine.py"
    reward.parent.mkdir()
    for line, changes in (("WORDS = open(__file__).read()", True), ("WORDS = []", False)):
        reward.write_text(f"{line}\n")
        before = code_digests(flat / "program.py", ["mine"])["rewards/mine.py"]
        reward.write_text(f"# Comment.\n{line}\n")
        after = code_digests(flat / "program.py", ["mine"])["rewards/mine.py"]
        assert (before != after) == changes


# The last one has a module with the name of one of ours.
@pytest.mark.parametrize(
    "line", ["import json", "import pkgother.a", "import library.other\nfrom library import other"]
)
def test_imports_of_other_distributions_are_not_followed(flat, line):
    (flat / "program.py").write_text(f"{line}\n")
    assert sorted(code_digests(flat / "program.py")) == ["program.py"]


# Two rooms of a package; each module prints something and imports nothing unless a test makes it.
ROOMS = {
    "program.py": "",
    "tool.py": "print()\n",
    "pkg/__init__.py": "print()\n",
    "pkg/low/__init__.py": "print()\nattribute = 1\n",
    "pkg/low/a.py": "print()\n",
    "pkg/low/b.py": "print()\n",
    "pkg/low/deep/__init__.py": "print()\n",
    "pkg/low/deep/c.py": "print()\n",
    "pkg/high/__init__.py": "print()\n",
    "pkg/high/d.py": "print()\n",
}
PKG, LOW, DEEP, HIGH = (f"pkg/{folder}__init__.py" for folder in ("", "low/", "low/deep/", "high/"))


def reached(root, program="program.py"):
    """The files that a program reaches, without itself."""
    return set(code_digests(root / program)) - {program}


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("import pkg", {PKG}),
        ("import pkg.low.deep.c as c", {PKG, LOW, DEEP, "pkg/low/deep/c.py"}),
        ("from pkg import low", {PKG, LOW}),
        # A module, an attribute of the package and a package in one statement.
        ("from pkg.low import a, attribute, deep", {PKG, LOW, "pkg/low/a.py", DEEP}),
        ("from pkg.low.deep.c import name", {PKG, LOW, DEEP, "pkg/low/deep/c.py"}),
        # A module in scripts/ outside the package.
        ("from tool import main", {"tool.py"}),
    ],
)
def test_a_program_reaches_each_package_on_the_way_to_a_module(write, line, files):
    assert reached(write({**ROOMS, "program.py": line})) == files


@pytest.mark.parametrize(
    ("module", "line", "files"),
    [
        ("pkg/low/a.py", "from . import b", {"pkg/low/b.py"}),
        ("pkg/low/a.py", "from . import attribute", set()),
        ("pkg/low/a.py", "from .deep import c", {DEEP, "pkg/low/deep/c.py"}),
        ("pkg/low/a.py", "from ..high.d import name", {HIGH, "pkg/high/d.py"}),
        ("pkg/low/a.py", "from .. import high", {HIGH}),
        # In an __init__.py, one dot is the package itself.
        (LOW, "from . import b", {"pkg/low/b.py"}),
        (PKG, "from .high.d import name", {HIGH, "pkg/high/d.py"}),
    ],
)
def test_relative_imports_are_followed(write, module, line, files):
    root = write({**ROOMS, "program.py": "import pkg.low.a", module: f"{line}\nprint()"})
    assert reached(root) == {PKG, LOW, "pkg/low/a.py"} | files


def test_a_package_hides_a_module_of_the_same_name_as_in_python(write):
    root = write({**ROOMS, "pkg/low/a/__init__.py": "print()", "program.py": "import pkg.low.a"})
    assert reached(root) == {PKG, LOW, "pkg/low/a/__init__.py"}


@pytest.mark.parametrize("line", ["from pkg.missing import name", "from .missing import name"])
def test_a_missing_module_of_ours_is_an_error(write, line):
    root = write({**ROOMS, "program.py": "import pkg.low.a", "pkg/low/a.py": line})
    with pytest.raises(FileNotFoundError, match="missing"):
        code_digests(root / "program.py")


def test_a_program_that_is_not_python_is_an_error_that_names_it(write):
    root = write({**ROOMS, "program.py": "import tool", "tool.py": "a b"})
    with pytest.raises(SyntaxError) as error:
        code_digests(root / "program.py")
    assert error.value.filename.endswith("tool.py")


def test_reward_functions_of_a_program_and_their_imports_are_part_of_its_code(flat):
    rewards = flat.with_name("rewards")
    rewards.mkdir()
    (rewards / "first.py").write_text("from pkg.d import one\n\nscore = one\n")
    (rewards / "second.py").write_text("import json\n")
    (rewards / "third.py").write_text("from pkg.a import one\n")
    digests = code_digests(flat / "program.py", ["first", "second"])
    without = code_digests(flat / "program.py")
    assert digests.keys() - without.keys() == {
        "rewards/first.py",
        "rewards/second.py",
        "pkg/d.py",
    }
    assert all(digests[name] == without[name] for name in without)
    assert digests["pkg/d.py"] == code_digests(flat / "other.py")["pkg/d.py"]


@pytest.fixture
def with_templates(flat):
    """The flat package with templates and a translation that no module names yet."""
    texts = {
        "templates/base.html": "base",
        "templates/page.html": '{% extends "base.html" %}',
        "templates/other.html": '{% extends "base.html" %}',
        "locale/texts.yaml": "one: 一",
    }
    for name, text in texts.items():
        path = flat / "pkg" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return flat


def test_templates_and_translations_that_a_module_names_are_part_of_the_code(with_templates):
    program = with_templates / "program.py"
    without = code_digests(program)
    assert all(name.endswith(".py") for name in without)
    program.write_text(program.read_text() + 'render("page.html")\n')
    with_page = code_digests(program)
    assert with_page.keys() - without.keys() == {
        "pkg/templates/base.html",
        "pkg/templates/page.html",
    }
    # The string may be in any module of the program.
    (with_templates / "pkg/b.py").write_text('from pkg.c import three\n\ntwo = "texts.yaml"\n')
    assert code_digests(program).keys() - with_page.keys() == {"pkg/locale/texts.yaml"}
