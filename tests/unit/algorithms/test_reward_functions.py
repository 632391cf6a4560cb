"""Reward functions: scores, weights, and errors of the user's programs."""

import sys

import pytest

from confined import CONFINED
from snakechat.algorithms import reward_functions as rewards
from snakechat.algorithms.reward_functions import function_columns, load_functions
from snakechat.data.dialogues import parse_prompt
from snakechat.data.records import PromptTexts, open_prompt_texts
from snakechat.workflow.errors import InputError

PROMPTS = ["\n\nHuman: My name is Pia and I need a pie.\n\nAssistant:"] * 3
RESPONSES = [
    " Hello Pia, get a pie at the bakery. You are welcome!",
    " Hello Pia, get a pie at the garage. You are welcome!",
    "",
]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes rewards/mine.py from source code or a returned expression."""
    folder = tmp_path / "rewards"
    folder.mkdir()
    monkeypatch.setattr(rewards, "FOLDER", folder)
    monkeypatch.setattr(sys, "path", sys.path.copy())

    def write(text, name="mine"):
        if "\n" not in text:
            text = f"def score(prompts, responses):\n    return {text}\n"
        (folder / f"{name}.py").write_text(text)

    return write


def scores_of(functions, prompts, responses, columns=()):
    """The scores of one function, and its weight."""
    [(weight, function)] = load_functions(functions).values()
    return function(prompts, responses, dict(columns)), weight


def mine(prompts=PROMPTS, responses=RESPONSES):
    return scores_of({"mine": 1}, prompts, responses)[0]


def test_a_function_receives_texts_arguments_and_the_columns_that_it_names(write):
    write(
        "def score(prompts, responses, solution, messages=None, other=5, *, bonus):\n"
        "    roles = [m[0]['role'] for m in messages]\n"
        "    lengths = [p.count('pie') + len(r) + bonus for p, r in zip(prompts, responses)]\n"
        "    numbers = [int(s or 0) + other * (r == 'user') for s, r in zip(solution, roles)]\n"
        "    return [length + number for length, number in zip(lengths, numbers)]\n"
    )
    functions = {"mine": {"weight": -2, "arguments": {"bonus": 10}}}
    columns = {"solution": ["1", "2", None], "messages": [[{"role": "user"}]] * 3, "level": [1] * 3}
    scores, weight = scores_of(functions, PROMPTS, ["a", "", "abc"], columns)
    assert (scores.tolist(), weight) == ([12 + 6, 11 + 7, 14 + 5], -2)


def test_messages_are_the_turns_of_the_prompt_and_the_response(tmp_path):
    prompts = ["\n\nSystem: Be brief.\n\nHuman: Hi?\n\nAssistant:", "\n\nHuman: Bye.\n\nAssistant:"]
    with open_prompt_texts(tmp_path, "train", ["solution", "level"]) as write:
        write({"prompt": [[], *map(parse_prompt, prompts)]}, [False, True, True])
        kept = {"kept_solution": ['[1, {"a": null}]'], "kept_level": ["2"]}
        write({"prompt": [[("user", "Why?")]], **kept}, [True])
    texts = PromptTexts(tmp_path, "train")
    columns = function_columns(texts, [2, 0], ["a", "b", "c", "d"])
    assert columns["solution"] == [[1, {"a": None}], None] * 2
    assert columns["level"] == [2, None] * 2
    # Also if no prompt has the cell.
    assert function_columns(texts, [0, 1], ["a", "b"])["solution"] == [None, None]
    why, be_brief = {"role": "user", "content": "Why?"}, {"role": "system", "content": "Be brief."}
    assert columns["messages"][2] == [why, {"role": "assistant", "content": "c"}]
    assert columns["messages"][3] == [
        be_brief,
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": "d"},
    ]


def test_booleans_arrays_and_tensors_are_accepted(write):
    array = "__import__('numpy').array([True, False, True])"
    for values in (f"[*{array}]", array, "__import__('torch').tensor([1.0, 0.0, 1.0])"):
        write(values)
        assert mine().tolist() == [1, 0, 1]


def test_modules_in_rewards_are_imported_from_their_source(write, tmp_path):
    before = dict(sys.modules)
    write(
        "import helper\nimport json\nfrom . import second as other\nfrom .second import WEIGHT\n"
        "def score(prompts, responses):\n"
        "    number = json.loads(helper.NUMBER) * WEIGHT + other.WEIGHT\n"
        "    return [number] * len(responses)\n"
    )
    # A function of the same name as a module of the standard library is not imported.
    write("raise ValueError\n", "json")
    write("WEIGHT = 5\n", "second")
    # Of the same size and second: cached bytecode would be stale.
    for number in (1, 2):
        write(f"from second import *\n\nNUMBER = '{number}'\n", "helper")
        assert mine().tolist() == [number * 5 + 5] * 3
    assert sys.modules == before
    # No bytecode is written next to them.
    assert {path.suffix for path in (tmp_path / "rewards").iterdir()} == {".py"}


def test_a_function_may_have_the_name_of_a_library_that_it_imports(write):
    write("import yaml\n\nscore = lambda prompts, responses: yaml.safe_load('[1, 2, 3]')\n", "yaml")
    assert scores_of({"yaml": 1}, PROMPTS, RESPONSES)[0].tolist() == [1, 2, 3]
    # Others import this one: the plan counts it, whatever is installed.
    write("from yaml import score\n")
    assert mine().tolist() == [1, 2, 3]


def test_a_denied_file_is_named_with_the_line_that_reads_it(write, monkeypatch):
    monkeypatch.setenv(CONFINED, "7")
    write(
        "def score(prompts, responses):\n"
        "    raise PermissionError(13, 'Permission denied', '/data/words.txt')\n"
    )
    line = r"^rewards/mine\.py: line 2: /data/words\.txt is denied: a job reads what"
    with pytest.raises(InputError, match=line):
        mine()


MISTAKES = {
    "no function": ("def scores():\n    pass\n", "has no function score(prompts, responses)"),
    "too few": (
        "[1.0, 2.0]",
        "score returned [1.0, 2.0], expected a number for each of 3 responses",
    ),
    "NaN": (
        "[1.0, 2.0, float('nan')]",
        f"score returned nan for the response {('Long ' * 12)[:60] + '…'!r}, expected a finite"
        " number or None",
    ),
    "ends the program": (
        "import sys\n\n\ndef score(prompts, responses):\n    sys.exit(0)\n",
        "line 5: SystemExit: 0",
    ),
    "an error that says what to do": (
        "from snakechat.workflow.errors import InputError\nraise InputError('set it ' * 9 + '.')\n",
        f"line 2: {'set it ' * 9}.",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_is_one_line_that_names_the_file(write, mistake):
    text, expected = MISTAKES[mistake]
    write(text)
    with pytest.raises(InputError) as error:
        mine(PROMPTS, ["", " Hello\nPia", "Long " * 100])
    assert str(error.value) == f"rewards/mine.py: {expected}"
