"""Digests of code and pins: what changes them, and what does not."""

import modulefinder
from pathlib import Path

import pytest

from conftest import ROOT
from snakechat.workflow.code_digests import code_digests, requirements_digest, source_digest

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
        return source_digest(path)

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
def test_comments_docstrings_and_layout_do_not_count(digest_of, old, new):
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
def test_every_real_change_counts(digest_of, old, new):
    assert SOURCE.count(old) >= 1
    assert digest_of(SOURCE.replace(old, new)) != digest_of(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [("1", "True"), ("0", "False"), ("0", "None"), ("''", "None"), ("[]", "None"), ("0", "-0.0")],
)
def test_constants_that_are_equal_or_empty_are_told_apart(digest_of, old, new):
    assert digest_of(f"x = {old}\n") != digest_of(f"x = {new}\n")


def test_a_string_that_is_no_docstring_counts(digest_of):
    assert digest_of('x = "a"\n') != digest_of('x = "b"\n')
    assert digest_of('def f():\n    return "a"\n') != digest_of('def f():\n    return "b"\n')


@pytest.fixture
def scripts(tmp_path):
    """A program that uses a and, through it, b; b and c use each other; d stands beside them."""
    root = tmp_path / "scripts"
    (root / "rlhf").mkdir(parents=True)
    modules = {
        "program.py": "import json\n\nfrom rlhf.a import one\n",
        "rlhf/__init__.py": "",
        "rlhf/a.py": "import numpy\n\n\ndef one():\n    from rlhf.b import two\n    return two\n",
        "rlhf/b.py": "from rlhf.c import three\n\ntwo = 2\n",
        "rlhf/c.py": "from rlhf.b import two\n\nthree = 3\n",
        "rlhf/d.py": "from rlhf.a import one\n",
        "other.py": "from rlhf.d import one\n",
    }
    for name, text in modules.items():
        (root / name).write_text(text)
    return root


def test_code_is_the_program_and_what_it_imports_and_nothing_else(scripts):
    found = code_digests(scripts / "program.py")
    # Python runs the package's own file before any of its modules.
    modules = ["rlhf/__init__.py", "rlhf/a.py", "rlhf/b.py", "rlhf/c.py"]
    assert sorted(found) == ["program.py", *modules]
    assert all(found[name] == source_digest(scripts / name) for name in found)


def test_a_change_of_an_imported_module_changes_its_digest_alone(scripts):
    before = code_digests(scripts / "program.py")
    (scripts / "rlhf/c.py").write_text("three = 4\n")
    after = code_digests(scripts / "program.py")
    assert [name for name in before if before[name] != after[name]] == ["rlhf/c.py"]


@pytest.mark.parametrize(
    "line",
    [
        "from rlhf.a import one",
        "from rlhf.a import one as first, one as second",
        "from rlhf import a",
        "from rlhf import a as other",
        "import rlhf.a",
        "import json, rlhf.a as other",
        "def late():\n    from rlhf import a\n",
    ],
)
def test_imports_of_every_form_are_followed(scripts, line):
    (scripts / "program.py").write_text(f"{line}\n")
    found = code_digests(scripts / "program.py")
    modules = ["rlhf/__init__.py", "rlhf/a.py", "rlhf/b.py", "rlhf/c.py"]
    assert sorted(found) == ["program.py", *modules]


@pytest.mark.parametrize("line", ["from . import d", "from .d import one"])
def test_imports_from_the_same_package_are_followed(scripts, line):
    (scripts / "rlhf/c.py").write_text(f"{line}\n\nthree = 3\n")
    assert "rlhf/d.py" in code_digests(scripts / "program.py")


@pytest.mark.parametrize("line", ["import json", "from os import path", "import rlhfother.a"])
def test_imports_of_others_are_not(scripts, line):
    (scripts / "program.py").write_text(f"{line}\n")
    assert sorted(code_digests(scripts / "program.py")) == ["program.py"]


def test_code_is_the_reward_functions_too_that_a_program_is_given(scripts):
    rewards = scripts.with_name("rewards")
    rewards.mkdir()
    (rewards / "first.py").write_text("from rlhf.d import one\n")
    (rewards / "second.py").write_text("import json\n")
    (rewards / "third.py").write_text("from rlhf.a import one\n")
    before = code_digests(scripts / "other.py")
    found = code_digests(scripts / "program.py", ["first", "second"])
    alone = code_digests(scripts / "program.py")
    assert found.keys() - alone.keys() == {"rewards/first.py", "rewards/second.py", "rlhf/d.py"}
    assert all(found[name] == alone[name] for name in alone)
    assert found["rlhf/d.py"] == before["rlhf/d.py"]
    assert found["rewards/first.py"] == source_digest(rewards / "first.py")


@pytest.fixture
def templates(scripts):
    """Templates next to module a: one names the base in `extends`, one is not named by any module."""
    texts = {
        "templates/base.html": "base",
        "templates/page.html": '{% extends "base.html" %}',
        "templates/other.html": '{% extends "base.html" %}',
        "locale/zh/texts.po": 'msgid ""',
    }
    for name, text in texts.items():
        path = scripts / "rlhf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return scripts / "rlhf"


def test_templates_and_translations_count_for_programs_that_name_them(scripts, templates):
    without = code_digests(scripts / "program.py")
    assert {name for name in without if not name.endswith(".py")} == set()
    source = (scripts / "program.py").read_text()
    (scripts / "program.py").write_text(f'{source}render("page.html")\n')
    with_page = code_digests(scripts / "program.py")
    pages = {"rlhf/templates/base.html", "rlhf/templates/page.html"}
    assert with_page.keys() - without.keys() == pages
    # The string may stand in any module of the program.
    (templates / "b.py").write_text('from rlhf.c import three\n\ntwo = "zh/texts.po"\n')
    found = code_digests(scripts / "program.py")
    assert found.keys() - with_page.keys() == {"rlhf/locale/zh/texts.po"}


def test_a_changed_template_changes_its_own_digest_only(scripts, templates):
    (scripts / "program.py").write_text('from rlhf.a import one\n\none("page.html")\n')
    before = code_digests(scripts / "program.py")
    (templates / "templates/base.html").write_text("another base")
    (templates / "templates/other.html").write_text("another page")
    after = code_digests(scripts / "program.py")
    changed = [name for name in before if before[name] != after[name]]
    assert changed == ["rlhf/templates/base.html"]


@pytest.mark.parametrize("program", sorted(path.name for path in SCRIPTS.glob("*.py")))
def test_all_our_modules_that_a_program_loads_are_in_its_code(program):
    # Python's own finder of imports, which sees every form of them.
    finder = modulefinder.ModuleFinder(path=[str(SCRIPTS)])
    finder.run_script(str(SCRIPTS / program))
    files = (Path(module.__file__) for module in finder.modules.values() if module.__file__)
    loaded = {path.relative_to(SCRIPTS).as_posix() for path in files if SCRIPTS in path.parents}
    found = code_digests(SCRIPTS / program)
    assert {name for name in found if name.endswith(".py")} == loaded


def requirements(folder, text):
    path = folder / "requirements.txt"
    path.write_text(text)
    return requirements_digest(path)


@pytest.mark.parametrize(
    "text",
    [
        "numpy==2.4.6\ntorch==2.13.0\n",
        "torch==2.13.0\nnumpy==2.4.6",
        "# The pins.\ntorch==2.13.0  # why\n\nnumpy==2.4.6\n",
        "Torch==2.13.0\n  numpy==2.4.6  \n",
    ],
)
def test_order_case_and_comments_of_requirements_do_not_count(tmp_path, text):
    expected = requirements(tmp_path, "torch==2.13.0\nnumpy==2.4.6\n")
    assert requirements(tmp_path, text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "torch==2.13.1\nnumpy==2.4.6\n",
        "torch==2.13.0\n",
        "torch==2.13.0\nnumpy==2.4.6\npeft==0.21.2\n",
        "torch==2.13.0\n# numpy==2.4.6\n",
        "torch==2.4.6\nnumpy==2.13.0\n",
    ],
)
def test_a_changed_pin_counts(tmp_path, text):
    expected = requirements(tmp_path, "torch==2.13.0\nnumpy==2.4.6\n")
    assert requirements(tmp_path, text) != expected
