"""Reward functions, the modules that they import and the files that they name are code."""

from functools import partial

import pytest

from snakechat.workflow.code_digests import program_code
from support.sources import write_sources


@pytest.fixture
def write(tmp_path):
    """A function that writes files, by path, under a folder scripts/ and returns that folder."""
    return partial(write_sources, tmp_path / "scripts")


# rewards/mine.py imports a module in rewards/ and one of ours, and reads a file.
REWARD = {
    "program.py": "print()\n",
    "pkg/__init__.py": "",
    "pkg/tools.py": "def sign():\n    return 1\n\n\ndef other():\n    return 2\n",
    "tools.py": "def weight():\n    return 3\n",
    "../rewards/mine.py": "from pkg.tools import sign\nfrom words import count\n\n"
    'FILES = ["words.txt", "lists/more words.txt"]\n\n\n'
    "def score(prompts, responses):\n    return [sign() * count(each) for each in responses]\n",
    "../rewards/words.py": "from . import length\n\n\ndef count(text):\n"
    "    return length.length(text)\n\n\ndef unused():\n    return 4\n",
    "../rewards/length.py": "import scipy\nfrom tools import weight\n\n\n"
    "def length(text):\n    return weight() * len(text) + bool(scipy)\n",
    "../rewards/other.py": "print()\n",
    "../rewards/words.txt": "good\n",
    "../rewards/others.txt": "one\n",
    "../rewards/lists/more words.txt": "better\n",
}


@pytest.mark.parametrize(
    ("file", "old", "new", "name"),
    [
        ("../rewards/mine.py", "sign() *", "-sign() *", "rewards/mine.py"),
        ("pkg/tools.py", "return 1", "return -1", "pkg/tools.py"),
        ("pkg/tools.py", "return 2", "return -2", "pkg/tools.py"),
        ("tools.py", "return 3", "return -3", "tools.py"),
        ("../rewards/words.py", "return length", "return -length", "rewards/words.py"),
        ("../rewards/words.py", "return 4", "return -4", "rewards/words.py"),
        ("../rewards/length.py", "* len", "* -len", "rewards/length.py"),
        ("../rewards/other.py", "print()", "print(1)", None),
        ("../rewards/words.txt", "good", "bad", "rewards/words.txt"),
        ("../rewards/others.txt", "one", "two", None),
        ("../rewards/lists/more words.txt", "better", "worse", "rewards/lists/more words.txt"),
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


def test_a_reward_function_finds_modules_in_rewards_and_our_modules_do_not(write):
    files = {
        "program.py": "import words\nwords.one()",
        "../rewards/words.py": "print()\n",
        "../rewards/mine.py": "import words\nwords.count\n",
    }
    code = program_code(write(files) / "program.py", ["mine"])
    assert code.digests.keys() == {"program.py", "rewards/mine.py", "rewards/words.py"}
    assert code.imports == {"words"}


@pytest.mark.parametrize("expression", ["-" * 9000 + "1", "+".join("1" * 2000)])
def test_a_deep_expression_is_an_error(write, expression):
    folder = write({**REWARD, "../rewards/other.py": f"x = {expression}\n"})
    with pytest.raises(ValueError, match="an expression is nested too deeply"):
        program_code(folder / "program.py", ["other"])
