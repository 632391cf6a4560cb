"""Digests of code: which edits change them, and which modules and files count."""

from functools import partial

import pytest

from conftest import ROOT
from snakechat.workflow.code_digests import Modules
from support.sources import code_digests, write_sources


@pytest.fixture
def write(tmp_path):
    """A function that writes files, by path, under a folder scripts/ and returns that folder."""
    return partial(write_sources, tmp_path / "scripts")


# --- imports ------------------------------------------------------------------------------------


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
    "pkg/twin.py": "import pkg.a\n",
    "pkg/twin/__init__.py": "",
    "pkg/folder/g.py": "print()\n",
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
        ("import json, pkg.a as other\nprint(other)", ONE),
        # Each package on the way to a module counts.
        ("import pkg.low.deep.f as f", {PKG, LOW, DEEP, "pkg/low/deep/f.py"}),
        # A folder needs no file of its own.
        ("from pkg.folder import g", {PKG, "pkg/folder/g.py"}),
        ("import pkg.folder.g", {PKG, "pkg/folder/g.py"}),
        # A module, an attribute of the package and a package in one statement.
        ("from pkg.low import d, attribute, deep", {PKG, LOW, "pkg/low/d.py", DEEP}),
        # As Python does, a package is preferred to a module of the same name.
        ("import pkg.twin", {PKG, "pkg/twin/__init__.py"}),
        # Other distributions; the last one has a module with the name of one of ours.
        ("import pkgother.a, library.tool\nfrom library import tool", set()),
    ],
)
def test_imports_of_a_program_are_followed(write, line, files):
    assert reached(write({**FILES, "program.py": f"{line}\n"})) == files


@pytest.mark.parametrize(
    ("module", "line", "files"),
    [
        ("pkg/low/d.py", "from . import e, attribute", {"pkg/low/e.py"}),
        ("pkg/low/d.py", "from ..folder import g", {"pkg/folder/g.py"}),
        ("pkg/low/d.py", "from ..c import name", {"pkg/b.py", "pkg/c.py"}),
        # In an __init__.py, one dot is the package itself.
        (LOW, "from . import e", {"pkg/low/e.py"}),
    ],
)
def test_relative_imports_are_followed(write, module, line, files):
    root = write({**FILES, "program.py": "import pkg.low.d", module: f"{line}\nprint()"})
    assert reached(root) == {PKG, LOW, "pkg/low/d.py"} | files


def test_a_missing_module_of_ours_is_an_error(write):
    root = write({**FILES, "program.py": "from pkg.missing import name"})
    with pytest.raises(FileNotFoundError, match="missing"):
        code_digests(root / "program.py")


# --- edits --------------------------------------------------------------------------------------


@pytest.fixture
def program(write):
    """The path of a program that imports pkg.a."""
    return write({**FILES, "program.py": "from pkg.a import one\n\none()\n"}) / "program.py"


SOURCE = 'def one(a=3):\n    """Text."""\n    return a + 1\n'


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("", False),
        ("TEXT = one.__doc__", True),
        ("from inspect import getdoc as read", True),
        ("import linecache", True),
    ],
)
def test_comments_and_layout_count_in_a_module_that_reads_its_own_source(program, line, counts):
    source = f"{SOURCE}\n\n{line}\n"
    same = [f"# Comment.\n{source}", source.replace("Text", "Other"), f"\n{source}"]
    same += [source.replace("a=3", "a = 3"), source.replace("a + 1", "(\n        a + 1)")]
    digests = []
    for text in (source, *same, source.replace("+", "-"), source.replace("=3", "=3.0")):
        (program.parent / "pkg/a.py").write_text(text)
        digests.append(code_digests(program)["pkg/a.py"])
    assert len({*digests[:6]}) == (6 if counts else 1)
    assert len({*digests}) == len({*digests[:6]}) + 2


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


# --- our programs ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_vllm_counts_where_it_samples_alone():
    program = ROOT / "scripts/generate_responses.py"
    more = code_digests(program, uses_vllm=True).keys() - code_digests(program).keys()
    assert "snakechat/modeling/vllm_sampler.py" in more
    assert not Modules(program.parent).code("train_sft").imports & {"vllm"}
