"""Digests of code: which edits change them."""

import ast
import dis
import modulefinder
from pathlib import Path

import pytest

from conftest import ROOT
from snakechat.workflow.code_digests import code_digests, program_code
from snakechat.workflow.errors import InputError
from snakechat.workflow.reachability import WITHOUT_EFFECT, Reach

SCRIPTS = ROOT / "scripts"

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
    ("old", "new"),
    [
        ("# Pi times the square.", "# Another comment."),
        ("        # Pi times the square.\n", ""),
        ('"""A module."""', '"""Another module."""'),
        ('"""A module."""\n', ""),
        ('"""A circle."""', '"""No square."""'),
        ('    """A circle."""\n\n', ""),
        ('        """Its area."""\n', ""),
        ('    """Wait."""\n', ""),
        ("radius * radius", "(radius\n            * radius)  # wrapped"),
        ("LIMIT = 3\n\n\n", "LIMIT = 3\n"),
        ("scale=1.0", "scale = 1.0"),
        ('"waited"', "'waited'"),
    ],
)
def test_comments_docstrings_and_layout_do_not_change_the_digest(digest_of, old, new):
    assert SOURCE.count(old) >= 1
    assert digest_of(SOURCE.replace(old, new)) == digest_of(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("radius * radius", "radius + radius"),
        ("LIMIT = 3", "LIMIT = 4"),
        ("LIMIT = 3", "LIMIT = 3.0"),
        ("LIMIT = 3", "LIMIT = '3'"),
        ("LIMIT = 3", "LIMIT = None"),
        ("LIMIT = 3", "LIMIT = 3\nOTHER = 4"),
        ("LIMIT = 3\n", ""),
        ("LIMIT", "BOUND"),
        ("scale=1.0", "scale=2.0"),
        ("scale=1.0", "scale=1"),
        ("scale=1.0", "*, scale=1.0"),
        ("scale=1.0", "scale"),
        ("square = radius", "area = radius"),
        ("import math", "import cmath as math"),
        ('"waited", seconds', 'seconds, "waited"'),
        ('"waited"', '"Waited"'),
        ("async def", "def"),
        ("return area * scale", "return -area * scale"),
        ("return area * scale", "area * scale"),
        ("class Circle:", "class Circle(object):"),
        (
            "        square = radius * radius\n        area = math.pi * square\n",
            "        area = math.pi * square\n        square = radius * radius\n",
        ),
    ],
)
def test_edits_of_code_change_the_digest(digest_of, old, new):
    assert SOURCE.count(old) >= 1
    assert digest_of(SOURCE.replace(old, new)) != digest_of(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [("1", "True"), ("0", "False"), ("0", "None"), ("''", "None"), ("[]", "None"), ("0", "-0.0")],
)
def test_equal_or_empty_constants_of_different_types_have_different_digests(digest_of, old, new):
    assert digest_of(f"x = {old}\n") != digest_of(f"x = {new}\n")


def test_strings_other_than_docstrings_change_the_digest(digest_of):
    assert digest_of('x = "a"\n') != digest_of('x = "b"\n')
    assert digest_of('def f():\n    return "a"\n') != digest_of('def f():\n    return "b"\n')


@pytest.fixture
def write(tmp_path):
    """A function that writes files, by path, under a folder scripts/ and returns that folder."""

    def write(files):
        root = tmp_path / "scripts"
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return root

    return write


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
REACHED = ["pkg/a.py", "pkg/b.py", "pkg/c.py"]


@pytest.fixture
def flat(write):
    return write(FLAT)


def test_code_is_the_program_and_the_modules_that_it_reaches(flat):
    assert sorted(code_digests(flat / "program.py")) == sorted(["program.py", *REACHED])


def test_an_edit_changes_the_digest_of_its_module_only(flat):
    before = code_digests(flat / "program.py")
    (flat / "pkg/c.py").write_text("three = 4\n")
    after = code_digests(flat / "program.py")
    assert [name for name in before if before[name] != after[name]] == ["pkg/c.py"]


@pytest.mark.parametrize(
    "line",
    [
        "from pkg.a import one\none",
        "from pkg.a import one as first, one as second\nsecond",
        "from pkg.a import *",
        "from pkg import a\na.one",
        "from pkg import a as other\nother.one",
        "import pkg.a\npkg.a.one",
        "import pkg.a as other\nother.one",
        "import json, pkg.a as other\nprint(other)",
        "def late():\n    from pkg import a\n    return a.one()\n",
        "def late():\n    from pkg import a\n    return getattr(a, 'o' + 'ne')\n",
        "if False:\n    from pkg.a import one\n    one()\n",
        "try:\n    from pkg.a import one\nexcept ImportError:\n    pass\none()\n",
        "import importlib\nimportlib.import_module('pkg.a').one()\n",
        "__import__('pkg.a')\n",
    ],
)
def test_import_statements_of_every_form_are_followed(flat, line):
    (flat / "program.py").write_text(f"{line}\n")
    assert sorted(code_digests(flat / "program.py")) == sorted(["program.py", *REACHED])


@pytest.mark.parametrize("line", ["import json", "from os import path", "import pkgother.a"])
def test_imports_of_other_distributions_are_not_followed(flat, line):
    (flat / "program.py").write_text(f"{line}\n")
    assert sorted(code_digests(flat / "program.py")) == ["program.py"]


def test_a_library_is_not_ours_because_one_of_its_modules_has_the_name_of_ours(flat):
    (flat / "program.py").write_text("import library.other\nfrom library import other\n")
    assert sorted(code_digests(flat / "program.py")) == ["program.py"]


# Two rooms of a package; each module prints something and imports nothing unless a test makes it.
ROOMS = {
    "program.py": "",
    "tool.py": "print()\n",
    "pkg/__init__.py": "print()\n",
    "pkg/top.py": "print()\n",
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
        ("import pkg.low", {PKG, LOW}),
        ("import pkg.low.a", {PKG, LOW, "pkg/low/a.py"}),
        ("import pkg.low.deep.c as c", {PKG, LOW, DEEP, "pkg/low/deep/c.py"}),
        ("from pkg import top", {PKG, "pkg/top.py"}),
        ("from pkg import low", {PKG, LOW}),
        # A module, an attribute of the package, both in one statement.
        ("from pkg.low import a", {PKG, LOW, "pkg/low/a.py"}),
        ("from pkg.low import attribute", {PKG, LOW}),
        ("from pkg.low import a, attribute, deep", {PKG, LOW, "pkg/low/a.py", DEEP}),
        ("from pkg.low.deep.c import name", {PKG, LOW, DEEP, "pkg/low/deep/c.py"}),
        # A module in scripts/ outside the package.
        ("import tool", {"tool.py"}),
        ("from tool import main", {"tool.py"}),
    ],
)
def test_a_program_reaches_each_package_on_the_way_to_a_module(write, line, files):
    assert reached(write({**ROOMS, "program.py": line})) == files


@pytest.mark.parametrize(
    ("module", "line", "files"),
    [
        ("pkg/low/a.py", "from . import b", {"pkg/low/b.py"}),
        ("pkg/low/a.py", "from .b import name", {"pkg/low/b.py"}),
        ("pkg/low/a.py", "from . import attribute", set()),
        ("pkg/low/a.py", "from .deep import c", {DEEP, "pkg/low/deep/c.py"}),
        ("pkg/low/a.py", "from .. import top", {"pkg/top.py"}),
        ("pkg/low/a.py", "from ..top import name", {"pkg/top.py"}),
        ("pkg/low/a.py", "from ..high.d import name", {HIGH, "pkg/high/d.py"}),
        ("pkg/low/a.py", "from .. import high", {HIGH}),
        # In an __init__.py, one dot is the package itself.
        (LOW, "from . import b", {"pkg/low/b.py"}),
        (LOW, "from ..high import d", {HIGH, "pkg/high/d.py"}),
        (PKG, "from .high.d import name", {HIGH, "pkg/high/d.py"}),
    ],
)
def test_relative_imports_are_followed(write, module, line, files):
    root = write({**ROOMS, "program.py": "import pkg.low.a", module: f"{line}\nprint()"})
    assert reached(root) == {PKG, LOW, "pkg/low/a.py"} | files


def test_an_edit_of_a_package_on_the_way_is_an_edit_of_the_program(write):
    root = write({**ROOMS, "program.py": "from pkg.low.deep.c import name"})
    before = code_digests(root / "program.py")
    for name in (PKG, LOW, DEEP):
        (root / name).write_text("print(1)\n")
        after = code_digests(root / "program.py")
        assert [key for key in before if before[key] != after[key]] == [name]
        before = after


def test_a_module_that_becomes_a_package_changes_the_code(write):
    root = write({**ROOMS, "program.py": "from pkg.low import a"})
    (root / "pkg/low/a.py").unlink()
    write({"pkg/low/a/__init__.py": "print()"})
    assert reached(root) == {PKG, LOW, "pkg/low/a/__init__.py"}


def test_a_package_hides_a_module_of_the_same_name_as_in_python(write):
    root = write({**ROOMS, "pkg/low/a/__init__.py": "print()", "program.py": "import pkg.low.a"})
    assert reached(root) == {PKG, LOW, "pkg/low/a/__init__.py"}


def test_programs_that_import_each_other_end(write):
    root = write(
        {**ROOMS, "program.py": "import tool", "tool.py": "import program, pkg.top; print()"}
    )
    assert reached(root) == {"tool.py", PKG, "pkg/top.py"}


@pytest.mark.parametrize(
    "line", ["import pkg.missing", "from pkg.missing import name", "import pkg.low.missing.c"]
)
def test_a_missing_module_of_ours_is_an_error(write, line):
    with pytest.raises(FileNotFoundError, match="missing"):
        code_digests(write({**ROOMS, "program.py": line}) / "program.py")


def test_a_missing_relative_module_is_an_error(write):
    root = write({**ROOMS, "program.py": "import pkg.low.a", "pkg/low/a.py": "from .gone import x"})
    with pytest.raises(FileNotFoundError, match="gone"):
        code_digests(root / "program.py")


def test_a_program_that_is_not_python_is_an_error_that_names_it(write):
    with pytest.raises(SyntaxError) as error:
        code_digests(
            write({**ROOMS, "program.py": "import pkg.top", "pkg/top.py": "a b"}) / "program.py"
        )
    assert error.value.filename.endswith("pkg/top.py")


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
        "locale/zh/texts.po": 'msgid ""',
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
    (with_templates / "pkg/b.py").write_text('from pkg.c import three\n\ntwo = "zh/texts.po"\n')
    assert code_digests(program).keys() - with_page.keys() == {"pkg/locale/zh/texts.po"}


def test_an_edit_of_a_template_changes_its_own_digest_only(with_templates):
    program = with_templates / "program.py"
    program.write_text('from pkg.a import one\n\none("page.html")\n')
    before = code_digests(program)
    (with_templates / "pkg/templates/base.html").write_text("another base")
    (with_templates / "pkg/templates/other.html").write_text("another page")
    after = code_digests(program)
    changed = [name for name in before if before[name] != after[name]]
    assert changed == ["pkg/templates/base.html"]


def changed(write, files, edits):
    """The files whose digests change if program.py runs with these edits: {FILE: (OLD, NEW)}."""
    program = write(files) / "program.py"
    before = code_digests(program)
    for name, (old, new) in edits.items():
        assert files[name].count(old) == 1, (name, old)
        (program.parent / name).write_text(files[name].replace(old, new))
    after = code_digests(program)
    return {name for name in before | after if before.get(name) != after.get(name)}


# The program reaches train, through two modules, and what it uses; nothing reaches the others.
DEFINITIONS = {
    "program.py": """from pkg.one import train as run
from pkg.one import unused

if __name__ == "__main__":
    run(3)
""",
    "pkg/__init__.py": "",
    "pkg/one.py": """import json
import numpy as np
from functools import cache
from typing import TYPE_CHECKING

from pkg import two
from pkg.two import Base, LIMIT as BOUND, unreached

if TYPE_CHECKING:
    from pkg.types import Type

FACTOR = 2
UNUSED = 3


class Trainer(Base):
    size: "Size" = 1

    def fit(self, rows):
        return two.step(rows)


class Size:
    one = 1


def train(count: "Type", bound=BOUND, *rest, **named):
    rows = [FACTOR * number for number in range(count)]
    for index, row in enumerate(rows):
        rows[index] = row + bound
    def inner(row):
        nonlocal rows
        rows = [row]
        return rows
    return Trainer().fit(inner(rows))


@cache
def unused(count):
    return unreached(json.dumps(count))
""",
    "pkg/two.py": """from pkg import three

LIMIT = 5
SEEN = 0


def decorate(function):
    return function


class Base:
    def loss(self, first, second):
        return first - second


@decorate
def step(rows):
    global SEEN
    SEEN += 1
    return three.total(rows)


def unreached(text):
    return three.other(text)
""",
    "pkg/three.py": """def total(rows):
    match rows:
        case [first, *others]:
            return first + sum(others)
    try:
        return (found := len(rows)) and found
    except TypeError as error:
        return {key: value for key, value in vars(error).items()}


def other(text):
    return text


if __name__ == "__main__":
    print(other("x"))
""",
    "pkg/types.py": "class Type:\n    pass\n",
}
ONE, TWO, THREE = (f"pkg/{name}.py" for name in ("one", "two", "three"))


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        # Definitions that the program does not reach: new, edited, removed, renamed.
        ("program.py", "import unused", "import unused as other"),
        (ONE, "UNUSED = 3", "UNUSED = 4"),
        (ONE, "UNUSED = 3\n", ""),
        (ONE, "UNUSED = 3", "UNUSED = 3\n\n\ndef new():\n    return train(1)"),
        (ONE, "json.dumps(count)", "json.dumps(count + 1)"),
        (ONE, "import json\n", "import json\nimport math\n"),
        (ONE, "import json\n", "import json\nfrom pkg.types import Type as Kind\n"),
        (TWO, "three.other(text)", "three.other(text.lower())"),
        (THREE, "    return text", "    return text + '.'"),
        (THREE, 'print(other("x"))', 'print(other("y"))'),
        ("pkg/types.py", "    pass", "    size = 1"),
        # Local names, in each way that binds one.
        (ONE, "number for number in", "item for item in"),
        (
            ONE,
            "for index, row in enumerate(rows):\n        rows[index] = row",
            "for i, r in enumerate(rows):\n        rows[i] = r",
        ),
        (ONE, "*rest, **named", "*others, **kwargs"),
        (
            THREE,
            "[first, *others]:\n            return first + sum(others)",
            "[a, *b]:\n            return a + sum(b)",
        ),
        (THREE, "(found := len(rows)) and found", "(count := len(rows)) and count"),
        (
            THREE,
            "error:\n        return {key: value for key, value in vars(error)",
            "e:\n        return {k: v for k, v in vars(e)",
        ),
        # What only a type checker sees.
        (ONE, "from pkg.types import Type", "from pkg.types import Type, Other"),
    ],
)
def test_an_edit_without_effect_on_what_the_program_reaches_changes_nothing(write, file, old, new):
    assert changed(write, DEFINITIONS, {file: (old, new)}) == set()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("program.py", "run(3)", "run(4)"),
        # A function, a constant, the default of a parameter, a class, its base, a decorator.
        (ONE, "return Trainer().fit", "return -Trainer().fit"),
        (ONE, "FACTOR = 2", "FACTOR = 3"),
        (ONE, "return two.step", "return -two.step"),
        (ONE, "one = 1", "one = 2"),
        (TWO, "LIMIT = 5", "LIMIT = 6"),
        (TWO, "first - second", "second - first"),
        (TWO, "return function", "return print"),
        (TWO, "SEEN = 0", "SEEN = 1"),
        (TWO, "SEEN += 1", "SEEN += 2"),
        (THREE, "first + sum", "first - sum"),
        # Parameters, which callers may name.
        (ONE, 'def train(count: "Type", bound=BOUND', 'def train(count: "Type", limit=BOUND'),
        (ONE, "def inner(row)", "def inner(rows)"),
        # Another local variable, not another name.
        (ONE, "rows[index] = row + bound", "rows[row] = index + bound"),
        (ONE, "nonlocal rows\n", "pass\n"),
        (TWO, "global SEEN\n", "SEEN = 0\n"),
        (THREE, "return first + sum(others)", "return first + sum(rows)"),
        # Another definition of the same name.
        (ONE, "LIMIT as BOUND", "SEEN as BOUND"),
        (ONE, "from pkg import two\n", "from pkg import three as two\n"),
        # What a module does when it is imported, and statements that bind a name again.
        (ONE, "UNUSED = 3", "print(3)"),
        (ONE, "UNUSED = 3", "two.LIMIT = 3"),
        (ONE, "UNUSED = 3", "FACTOR = 3"),
        (THREE, "def other", "total.calls = 0\n\n\ndef other"),
        (THREE, "def other", "@print\ndef other"),
        ("pkg/types.py", "class Type", "print()\n\n\nclass Type"),
    ],
)
def test_an_edit_of_what_the_program_reaches_changes_the_digest_of_its_file(write, file, old, new):
    files = {**DEFINITIONS, "pkg/__init__.py": "import pkg.types\n"}
    # Another import reaches other definitions.
    expected = {ONE, TWO, THREE} if "import" in new or "BOUND" in new else {file}
    assert file in changed(write, files, {file: (old, new)}) <= expected


CASES = {
    "re-export through packages": (
        {
            "program.py": "from pkg import public\npublic()\n",
            "pkg/__init__.py": "from pkg.low import public, hidden\n",
            "pkg/low/__init__.py": "from .a import private as public\nfrom .a import hidden\n",
            "pkg/low/a.py": "def private():\n    return 1\n\n\ndef hidden():\n    return 2\n",
        },
        {"pkg/low/a.py": ("return 1", "return 3")},
        {"pkg/low/a.py": ("return 2", "return 3")},
    ),
    "import inside a function": (
        {
            "program.py": "from pkg.a import used\nused()\n",
            "pkg/a.py": "def used():\n    from pkg import b\n    return b.one()\n\n\n"
            "def unused():\n    from pkg import c\n    return c.one()\n",
            "pkg/__init__.py": "",
            "pkg/b.py": "def one():\n    return 1\n\n\ndef two():\n    return 2\n",
            "pkg/c.py": "print(1)\n\n\ndef one():\n    return 3\n",
        },
        {"pkg/b.py": ("return 1", "return 4")},
        {"pkg/b.py": ("return 2", "return 4"), "pkg/c.py": ("print(1)", "print(2)")},
    ),
    "import of any name": (
        {"program.py": "from a import *\n", "a.py": "def one():\n    return 1\n"},
        {"a.py": ("return 1", "return 2")},
        {},
    ),
    "module whose attributes have computed names": (
        {
            "program.py": "import a\nprint(getattr(a, 'on' + 'e'))\n",
            "a.py": "from b import two\n\n\ndef one():\n    return 1\n",
            "b.py": "def two():\n    return 2\n\n\ndef three():\n    return 3\n",
        },
        {"a.py": ("return 1", "return 2"), "b.py": ("return 2", "return 4")},
        {"b.py": ("return 3", "return 4")},
    ),
    "package as a value": (
        {
            "program.py": "import pkg\nprint(vars(pkg))\n",
            "pkg/__init__.py": "",
            "pkg/a.py": "def one():\n    return 1\n",
        },
        {"pkg/a.py": ("return 1", "return 2")},
        {},
    ),
    "names of the own module": (
        {
            "program.py": "from a import one\none()\n",
            "a.py": "def one():\n    return globals()['t' + 'wo']()\n\n\n"
            "def two():\n    return 2\n",
        },
        {"a.py": ("return 2", "return 3")},
        {},
    ),
    "modules of any name": (
        {
            "program.py": "import importlib, sys\nimportlib.import_module(sys.argv[1])\n",
            "pkg/a.py": "def one():\n    return 1\n",
        },
        {"pkg/a.py": ("return 1", "return 2")},
        {},
    ),
    "attribute that a module makes": (
        {
            "program.py": "from a import one\none()\n",
            "a.py": "def __getattr__(name):\n    return OTHER[name]\n\n\nOTHER = {'one': print}\n",
        },
        {"a.py": ("print", "len")},
        {},
    ),
    "registry": (
        {
            "program.py": "import a\na.CHECKS\n",
            "a.py": "CHECKS = []\n\n\ndef check(function):\n    CHECKS.append(function)\n\n\n"
            "@check\ndef one():\n    return 1\n\n\nTWO = check(3)\nFOUR = len([4])\n",
        },
        {"a.py": ("return 1\n\n\nTWO = check(3)", "return 2\n\n\nTWO = check(4)")},
        {"a.py": ("[4]", "[5]")},
    ),
    "registry in another module": (
        {
            "program.py": "import a\nimport b\nb.SEEN\n",
            "a.py": "import b\n\nONE = b.note(1)\nTWO = b.double(2)\n",
            "b.py": "SEEN = {}\n\n\ndef note(name):\n    SEEN[name] = 1\n\n\n"
            "def double(number):\n    return 2 * number\n",
        },
        {"a.py": ("note(1)", "note(2)")},
        {"a.py": ("double(2)", "double(3)")},
    ),
    "call of a library whose value is not used": (
        {
            "program.py": "from a import one\none()\n",
            "a.py": "import torch, re\n\n\ndef one():\n    return 1\n\n\n"
            "THREADS = torch.set_num_threads(2)\nPATTERN = re.compile('3')\n"
            "NAMES = {}\nKEYS = list(NAMES.items())\nFIRST = NAMES.setdefault(4)\n\n\n"
            "def late():\n    return torch.set_num_threads(5)\n",
        },
        {"a.py": ("threads(2)", "threads(3)")},
        {"a.py": ("re.compile('3')", "re.compile('4')\nLAST = list(NAMES)")},
    ),
    "method that changes a constant": (
        {
            "program.py": "from a import NAMES\nNAMES\n",
            "a.py": "NAMES = {}\nFIRST = NAMES.setdefault(4)\n\n\nclass A:\n    names = NAMES\n",
        },
        {"a.py": ("default(4)", "default(5)")},
        {"a.py": ("    names = NAMES", "    names = list(NAMES)")},
    ),
    "names of another module": (
        {
            "program.py": "import a\nprint(a.__dict__['o' + 'ne'], a.__name__)\n",
            "a.py": "def one():\n    return 1\n",
        },
        {"a.py": ("return 1", "return 2")},
        {},
    ),
    "modules that are imported": (
        {
            "program.py": "import sys\nimport a\nsys.modules['a'].one()\n",
            "a.py": "def one():\n    return 1\n",
        },
        {"a.py": ("return 1", "return 2")},
        {},
    ),
    "documentation of a module that is imported": (
        {
            "program.py": "import sys\nimport a\nsys.modules[a.name].__doc__\n"
            "print([name for name in sys.modules], 'a' in sys.modules)\n",
            "a.py": "name = 'a'\n\n\ndef one():\n    return 1\n",
        },
        {"a.py": ("'a'", "'b'")},
        {"a.py": ("return 1", "return 2")},
    ),
    "derived classes": (
        {
            "program.py": "import a\nfrom b import Base\nprint(Base.__subclasses__())\n",
            "a.py": "from b import Base\n\n\nclass Derived(Base):\n    one = 1\n",
            "b.py": "class Base:\n    pass\n\n\ndef other():\n    return 2\n",
        },
        {"a.py": ("one = 1", "one = 2")},
        {"b.py": ("return 2", "return 3")},
    ),
    "local variables by their names": (
        {
            "program.py": "def main():\n    one = 1\n    print(locals())\n",
        },
        {"program.py": ("one", "two")},
        {},
    ),
    "variables of a class": (
        {
            "program.py": "from a import A\nA.size\n",
            "a.py": "size = 3\nother = 4\n\n\nclass A:\n    size = size\n\n"
            "    def get(self):\n        return size, self.other\n",
        },
        {"a.py": ("size = 3", "size = 5")},
        {"a.py": ("other = 4", "other = 5")},
    ),
    "function as the default of a parameter, in a nested scope": (
        {
            "program.py": "from a import main\nmain()\n",
            "a.py": "def main():\n    one = 2\n"
            "    return [(lambda x=one(): x) for one in [one]], two\n\n\n"
            "def one():\n    return 1\n\n\ndef two():\n    return 2\n",
        },
        {"a.py": ("return 2\n", "return 3\n")},
        {"a.py": ("return 1\n", "return 3\n")},
    ),
    "package without __init__.py": (
        {
            "program.py": "import pkg.low.a\npkg.low.a.one()\n",
            "pkg/__init__.py": "",
            "pkg/low/a.py": "def one():\n    return 1\n\n\ndef two():\n    return 2\n",
        },
        {"pkg/low/a.py": ("return 1", "return 3")},
        {"pkg/low/a.py": ("return 2", "return 3")},
    ),
    "folders of modules without __init__.py, of any name": (
        {
            "program.py": "import importlib, sys\nimportlib.import_module(sys.argv[1])\n",
            "low/deep/a.py": "def one():\n    return 1\n",
        },
        {"low/deep/a.py": ("return 1", "return 3")},
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_resolved_counts_and_nothing_more(write, case):
    files, effective, without_effect = CASES[case]
    for name, edit in effective.items():
        assert changed(write, files, {name: edit}) == {name}
    for name, edit in without_effect.items():
        assert changed(write, files, {name: edit}) == set()


def test_functions_may_move_but_statements_with_effects_may_not(write):
    one, two = "def one():\n    return 1\n\n\n", "def two():\n    return 2\n\n\n"
    edit = {"program.py": (one + two, two + one)}
    assert changed(write, {"program.py": f"{one}{two}print(one, two)\n"}, edit) == set()
    other = one.replace("1", "3")
    edit = {"program.py": (one + other, other + one)}
    assert changed(write, {"program.py": f"{one}{other}print(one)\n"}, edit) == {"program.py"}
    edit = {"program.py": ("print(1)\nprint(2)", "print(2)\nprint(1)")}
    assert changed(write, {"program.py": "print(1)\nprint(2)\n"}, edit) == {"program.py"}


@pytest.mark.parametrize(
    ("program", "libraries"),
    [
        ("import numpy as np\nnp.zeros(1)", {"numpy"}),
        ("from torch.nn import functional\nfunctional.relu", {"torch"}),
        ("import os, json\nos.getcwd()", set()),
        ("def late():\n    import tqdm.auto", {"tqdm"}),
        ("from pkg.a import one\none()", {"scipy"}),
        ("from pkg.a import two\ntwo()", {"jinja2"}),
        # For what it does when it is imported.
        ("import torch_plugin", {"torch_plugin"}),
        ("from pkg.b import three\nthree()", {"matplotlib"}),
        ("import importlib\nimportlib.import_module('peft')", {"peft"}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n", set()),
    ],
)
def test_libraries_of_a_program_are_those_of_definitions_that_it_reaches(write, program, libraries):
    files = {
        "program.py": program,
        "pkg/__init__.py": "",
        "pkg/a.py": "import jinja2\nimport scipy.stats\n\n\ndef one():\n    return scipy.stats\n"
        "\n\ndef two():\n    return jinja2.Template\n",
        "pkg/b.py": "import matplotlib\n\n\ndef three():\n    return 3\n",
    }
    assert program_code(write(files) / "program.py").imports == libraries


@pytest.mark.parametrize(
    ("lines", "counts"),
    [
        (["import numpy", "import torch"], False),
        (["import torch", "import torch.nn"], False),
        (["import torch", "numpy = 3"], True),
        (["from torch import numpy", "from scipy import numpy, torch"], True),
        (["from scipy import numpy, torch", "def numpy():\n    pass\n"], True),
        (["import torch", "print()"], True),
    ],
)
def test_imports_may_move_unless_the_order_has_an_effect(write, lines, counts):
    text, moved = ("\n".join([*each, "print(torch, numpy)\n"]) for each in (lines, lines[::-1]))
    different = changed(write, {"program.py": text}, {"program.py": (text, moved)})
    assert different == ({"program.py"} if counts else set())


def test_a_library_of_another_place_changes_the_code(write):
    files = {"program.py": "import a\na.one", "a.py": "from numpy import one\n"}
    assert changed(write, files, {"a.py": ("numpy", "torch")}) == {"a.py"}


# rewards/mine.py imports a module in rewards/ and one of ours, and reads a file.
REWARD = {
    "program.py": "print()\n",
    "pkg/__init__.py": "",
    "pkg/tools.py": "def sign():\n    return 1\n\n\ndef other():\n    return 2\n",
    "tools.py": "def weight():\n    return 3\n",
    "../rewards/mine.py": "from pkg.tools import sign\nfrom words import count\n\n"
    'FILES = ["words.txt", "lists/more.txt"]\n\n\n'
    "def score(prompts, responses):\n    return [sign() * count(each) for each in responses]\n",
    "../rewards/words.py": "from . import length\n\n\ndef count(text):\n"
    "    return length.length(text)\n\n\ndef unused():\n    return 4\n",
    "../rewards/length.py": "import scipy\nfrom tools import weight\n\n\n"
    "def length(text):\n    return weight() * len(text) + bool(scipy)\n",
    "../rewards/other.py": "print()\n",
    "../rewards/words.txt": "good\n",
    "../rewards/lists/more.txt": "better\n",
}


@pytest.mark.parametrize(
    ("file", "old", "new", "name"),
    [
        ("../rewards/mine.py", "sign() *", "-sign() *", "rewards/mine.py"),
        ("pkg/tools.py", "return 1", "return -1", "pkg/tools.py"),
        ("pkg/tools.py", "return 2", "return -2", None),
        ("tools.py", "return 3", "return -3", "tools.py"),
        ("../rewards/words.py", "return length", "return -length", "rewards/words.py"),
        ("../rewards/words.py", "return 4", "return -4", None),
        ("../rewards/length.py", "* len", "* -len", "rewards/length.py"),
        ("../rewards/other.py", "print()", "print(1)", None),
        ("../rewards/words.txt", "good", "bad", "rewards/words.txt"),
        ("../rewards/lists/more.txt", "better", "worse", "rewards/lists/more.txt"),
    ],
)
def test_helpers_and_files_of_a_reward_function_are_part_of_its_code(write, file, old, new, name):
    root = write(REWARD)
    before = program_code(root / "program.py", ["mine"])
    assert REWARD[file].count(old) == 1
    write({file: REWARD[file].replace(old, new)})
    after = program_code(root / "program.py", ["mine"])
    names = before.digests.keys()
    assert after.digests.keys() == names
    different = {each for each in names if before.digests[each] != after.digests[each]}
    assert different == {name} - {None}
    assert before.imports == {"scipy"}
    assert program_code(root / "program.py").digests.keys() == {"program.py"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ('["none.txt"]', "rewards/mine.py: FILES names none.txt: there is no file "),
        ('["lists"]', "rewards/mine.py: FILES names lists: there is no file "),
        (
            '["../scripts/tools.py"]',
            "rewards/mine.py: FILES names ../scripts/tools.py, which is not in rewards/",
        ),
        ('"words.txt"', "rewards/mine.py: FILES must be a list of names, such as"),
        ("glob('*')", "rewards/mine.py: FILES must be a list of names, such as"),
    ],
)
def test_a_wrong_list_of_files_of_a_reward_function_is_an_error(write, files, message):
    root = write({**REWARD, "../rewards/mine.py": f"FILES = {files}\n"})
    with pytest.raises(InputError) as error:
        program_code(root / "program.py", ["mine"])
    assert str(error.value).startswith(message)


def test_a_reward_function_finds_modules_in_rewards_and_our_modules_do_not(write):
    files = {
        "program.py": "import words\nwords.one()",
        "../rewards/words.py": "print()\n",
        "../rewards/mine.py": "import words\nwords.count\n",
    }
    code = program_code(write(files) / "program.py", ["mine"])
    assert code.digests.keys() == {"program.py", "rewards/mine.py", "rewards/words.py"}
    assert code.imports == {"words"}


def reach_of(program):
    reach = Reach(SCRIPTS)
    reach.count_whole((program.removesuffix(".py"),), is_program=True)
    reach.finish()
    return reach


PROGRAMS = sorted(path.name for path in SCRIPTS.glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_modules_of_our_programs_are_among_those_that_python_finds(program):
    # The standard library's finder of imports serves as an independent implementation. It also
    # follows imports inside functions that the program does not reach.
    finder = modulefinder.ModuleFinder(path=[str(SCRIPTS)])
    finder.run_script(str(SCRIPTS / program))
    files = (Path(module.__file__) for module in finder.modules.values() if module.__file__)
    loaded = {path for path in files if SCRIPTS in path.parents}
    reach = reach_of(program)
    assert {reach.path(key) for key in reach.modules} <= loaded


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_in_our_programs_makes_all_modules_count(program):
    assert {name for name in code_digests(SCRIPTS / program) if "/" not in name} == {program}


def loaded_globals(code):
    """The global names that compiled code loads."""
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    return names.union(
        *(loaded_globals(each) for each in code.co_consts if hasattr(each, "co_code"))
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_python_loads_no_global_name_of_reached_definitions_that_is_not_reached(program):
    """The compiler serves as an independent implementation of the scopes of names."""
    reach = reach_of(program)

    def is_reached(key, name):
        state = reach.modules[key]
        binding = state.module.bindings.get(name)
        return binding is None or (
            state.reached.issuperset(binding.statements)
            and state.imports.issuperset(binding.imports)
        )

    checked = 0
    for key, state in reach.modules.items():
        for node in ast.parse(reach.path(key).read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and is_reached(key, node.name):
                code = compile(ast.Module([node], []), "", "exec")
                names = {name for name in loaded_globals(code) if not is_reached(key, name)}
                assert names == set(), (key, node.name)
                checked += 1
        for each in state.imports:
            module = tuple(each.module.split("."))
            if each.attribute and module in reach.modules and module not in WITHOUT_EFFECT:
                assert is_reached(module, each.attribute), (key, each)
    assert checked > 3


def test_libraries_of_our_programs():
    split = program_code(SCRIPTS / "split_dataset.py").imports
    training = program_code(SCRIPTS / "train_sft.py").imports
    assert {"torch", "transformers", "deepspeed"} <= training
    assert split.isdisjoint({"torch", "transformers", "deepspeed", "matplotlib"})
    drawing = program_code(SCRIPTS / "draw_report.py").imports
    assert "matplotlib" in drawing - training and "torch" not in drawing


def test_locks_records_and_the_cache_make_no_result_stale():
    """They are imported by every job, and no content depends on them."""
    names = program_code(SCRIPTS / "train_sft.py").digests
    unwanted = {f"snakechat/workflow/{name}.py" for name in ("locks", "run_record", "result_cache")}
    assert unwanted.isdisjoint(names)
    assert {"snakechat/workflow/job.py", "snakechat/workflow/distributed.py"} <= names.keys()
