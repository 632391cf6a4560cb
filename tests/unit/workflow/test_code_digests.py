"""Digests of code: which edits change them, and which modules and files count."""

from functools import partial

import pytest

from snakechat.workflow.code_digests import Modules
from support.sources import code_digests, write_sources

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


WITHOUT_EFFECT = {
    "# Pi times the square.": "# Another comment.",
    '"""A module."""\n': "",
    '"""A circle."""': '"""Another class."""',
    '        """Its area."""\n': "",
    '    """Wait."""\n': "",
    "radius * radius": "(radius\n            * radius)  # wrapped",
}


@pytest.mark.parametrize(
    ("edits", "counts"),
    [
        (WITHOUT_EFFECT, False),
        ({"radius * radius": "radius + radius"}, True),
        ({"LIMIT = 3": "LIMIT = 3.0"}, True),
        ({'"waited"': '"Waited"'}, True),
    ],
)
def test_code_counts_and_comments_docstrings_and_layout_do_not(tmp_path, edits, counts):
    path, text = tmp_path / "module.py", SOURCE
    path.write_text(text)
    before = code_digests(path)
    for old, new in edits.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    assert (code_digests(path) != before) == counts


# --- imports ------------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path):
    """A function that writes files, by path, under a folder scripts/ and returns that folder."""
    return partial(write_sources, tmp_path / "scripts")


# The packages of two rooms, one in another; pkg.a imports pkg.b, and that and pkg.c each other.
FILES = {
    "tool.py": "import program\n",
    "pkg/__init__.py": "",
    "pkg/a.py": "import numpy\n\n\ndef one():\n    from pkg.b import two\n    return two\n",
    "pkg/b.py": "from pkg.c import three\n\ntwo = lambda: three\n",
    "pkg/c.py": "from pkg.b import two\n\nthree = 3\n",
    "pkg/low/__init__.py": "attribute = 1\n",
    "pkg/low/d.py": "print()\n",
    "pkg/low/e.py": "print()\n",
    "pkg/low/deep/__init__.py": "",
    "pkg/low/deep/f.py": "print()\n",
}
PKG, LOW, DEEP = (f"pkg/{folder}__init__.py" for folder in ("", "low/", "low/deep/"))
ONE = {PKG, "pkg/a.py", "pkg/b.py", "pkg/c.py"}


def reached(root, program="program.py"):
    """The files that a program reaches, without itself."""
    return set(code_digests(root / program)) - {program}


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("from pkg.a import *", ONE),
        ("from pkg import a as other\nother.one", ONE),
        ("import json, pkg.a as other\nprint(other)", ONE),
        ("def late():\n    from pkg import a\n    return a.one()", ONE),
        # Each package on the way to a module counts.
        ("import pkg.low.deep.f as f", {PKG, LOW, DEEP, "pkg/low/deep/f.py"}),
        # A module, an attribute of the package and a package in one statement.
        ("from pkg.low import d, attribute, deep", {PKG, LOW, "pkg/low/d.py", DEEP}),
        # A module outside the package, which imports the program.
        ("from tool import main", {"tool.py"}),
        # Other distributions; the last one has a module with the name of one of ours.
        ("import pkgother.a, library.tool\nfrom library import tool", set()),
    ],
)
def test_imports_of_a_program_are_followed(write, line, files):
    assert reached(write({**FILES, "program.py": f"{line}\n"})) == files


@pytest.mark.parametrize(
    ("module", "line", "files"),
    [
        ("pkg/low/d.py", "from . import e", {"pkg/low/e.py"}),
        ("pkg/low/d.py", "from . import attribute", set()),
        ("pkg/low/d.py", "from ..c import name", {"pkg/b.py", "pkg/c.py"}),
        # In an __init__.py, one dot is the package itself.
        (LOW, "from . import e", {"pkg/low/e.py"}),
    ],
)
def test_relative_imports_are_followed(write, module, line, files):
    root = write({**FILES, "program.py": "import pkg.low.d", module: f"{line}\nprint()"})
    assert reached(root) == {PKG, LOW, "pkg/low/d.py"} | files


def test_a_package_hides_a_module_of_the_same_name_as_in_python(write):
    root = write({**FILES, "pkg/low/d/__init__.py": "", "program.py": "import pkg.low.d"})
    assert reached(root) == {PKG, LOW, "pkg/low/d/__init__.py"}


def test_a_missing_module_of_ours_is_an_error(write):
    root = write({**FILES, "program.py": "from pkg.missing import name"})
    with pytest.raises(FileNotFoundError, match="missing"):
        code_digests(root / "program.py")


# --- edits --------------------------------------------------------------------------------------


@pytest.fixture
def program(write):
    """The path of a program that imports pkg.a."""
    return write({**FILES, "program.py": "from pkg.a import one\n\none()\n"}) / "program.py"


@pytest.mark.parametrize(
    "line",
    [
        *("TEXT = one.__doc__", "from inspect import getdoc as read", "import linecache"),
        *("FILE = open(one.__code__.co_filename)", "VALUES = one.__code__.co_consts"),
    ],
)
def test_a_module_that_reads_its_own_source_counts_with_comments_and_docstrings(program, line):
    source = f'def one():\n    """Text."""\n\n\n{line}\n'
    digests = set()
    for text in (source, source.replace("Text", "Another"), f"# Comment.\n{source}", f"\n{source}"):
        (program.parent / "pkg/a.py").write_text(text)
        digests.add(code_digests(program)["pkg/a.py"])
    assert len(digests) == 4


def test_templates_and_translations_that_a_module_names_are_part_of_the_code(write, program):
    before = code_digests(program).keys()
    texts = {
        "pkg/templates/base.html": "base",
        "pkg/templates/page.html": '{% extends "base.html" %}',
        "pkg/templates/other.html": '{% extends "base.html" %}',
        "pkg/tables/texts.yaml": "one: 一",
    }
    write(texts)
    assert code_digests(program).keys() == before
    program.write_text(program.read_text() + 'render("page.html")\n')
    pages = {"pkg/templates/base.html", "pkg/templates/page.html"}
    assert code_digests(program).keys() - before == pages
    # The string may be in any module of the program.
    write({"pkg/b.py": 'from pkg.c import three\n\ntwo = "texts.yaml"\n'})
    assert code_digests(program).keys() - before == {*pages, "pkg/tables/texts.yaml"}


# --- reward functions ---------------------------------------------------------------------------

# rewards/mine.py imports a module in rewards/ and one of ours, and reads a file.
REWARD = {
    "program.py": "print()\n",
    "pkg/__init__.py": "",
    "pkg/tools.py": "def sign():\n    return 1\n\n\ndef other():\n    return 2\n",
    "../rewards/mine.py": "from pkg.tools import sign\nfrom words import count\n\n"
    'FILE = "lists/more words.txt"\n\n\n'
    "def score(prompts, responses):\n    return [sign() * count(each) for each in responses]\n",
    "../rewards/words.py": "from . import length\n\n\ndef count(text):\n"
    "    return length.length(text)\n",
    "../rewards/length.py": "import tqdm\n\n\n"
    "def length(text):\n    return 3 * len(text) + bool(tqdm)\n",
    "../rewards/other.py": "print()\n",
    "../rewards/others.txt": "one\n",
    "../rewards/lists/more words.txt": "better\n",
}


@pytest.mark.parametrize(
    ("file", "old", "new", "counts"),
    [
        ("../rewards/mine.py", "sign() *", "-sign() *", True),
        ("pkg/tools.py", "return 2", "return -2", True),
        ("../rewards/length.py", "* len", "* -len", True),
        ("../rewards/other.py", "print()", "print(1)", False),
        ("../rewards/others.txt", "one", "two", False),
        ("../rewards/lists/more words.txt", "better", "worse", True),
    ],
)
def test_helpers_and_files_of_a_reward_function_are_part_of_its_code(write, file, old, new, counts):
    root = write(REWARD)
    before = Modules(root).code("program", ["mine"])
    assert REWARD[file].count(old) == 1
    write({file: REWARD[file].replace(old, new)})
    after = Modules(root).code("program", ["mine"])
    names = before.digests.keys()
    assert after.digests.keys() == names
    different = {each for each in names if before.digests[each] != after.digests[each]}
    assert different == ({file.removeprefix("../")} if counts else set())
    assert before.imports == {"tqdm"}
    assert Modules(root).code("program").digests.keys() == {"program.py"}


def test_comments_count_in_a_reward_function_that_may_open_its_own_file(write):
    digests = set()
    for comment in ("", "# A comment.\n"):
        text = f"{comment}WORDS = open(__file__).read()\n"
        root = write({**REWARD, "../rewards/mine.py": text})
        digests.add(code_digests(root / "program.py", ["mine"])["rewards/mine.py"])
    assert len(digests) == 2


def test_a_reward_function_finds_modules_in_rewards_and_our_modules_do_not(write):
    files = {
        "program.py": "import words\nwords.one()",
        "../rewards/words.py": "print()\n",
        "../rewards/mine.py": "import words\nwords.count\n",
    }
    code = Modules(write(files)).code("program", ["mine"])
    assert code.digests.keys() == {"program.py", "rewards/mine.py", "rewards/words.py"}
    assert code.imports == {"words"}


@pytest.mark.parametrize("expression", ["-" * 9000 + "1", "+".join("1" * 2000)])
def test_a_deep_expression_is_an_error(write, expression):
    folder = write({**REWARD, "../rewards/other.py": f"x = {expression}\n"})
    with pytest.raises(ValueError, match="an expression is nested too deeply"):
        Modules(folder).code("program", ["other"])
