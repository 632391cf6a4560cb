"""Definitions that a program reaches by name: edits of others change no digest."""

from functools import partial

import pytest

from snakechat.workflow.code_digests import program_code
from support.sources import changed, write_sources


@pytest.fixture
def write(tmp_path):
    """A function that writes files, by path, under a folder scripts/ and returns that folder."""
    return partial(write_sources, tmp_path / "scripts")


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
