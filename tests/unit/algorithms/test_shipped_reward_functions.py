"""The reward functions that the project ships, by what they score."""

import signal
import time

from snakechat.algorithms.reward_functions import load_functions
from snakechat.evaluation import sandbox


def scores(name, responses, columns=None, **arguments):
    functions = load_functions({name: {"weight": 1, "arguments": arguments}})
    _, function = functions[name]
    return function(["p"] * len(responses), responses, columns or {}).tolist()


def test_exact_match():
    responses = [" Paris\n", "paris", "In Paris", "New  York", "", "7", "None"]
    solution = ["Paris", "Paris", "Paris", "New York", "x", 7, None]
    assert scores("exact_match", responses, {"solution": solution}) == [1, 0, 0, 1, 0, 1, 0]
    ignored = scores("exact_match", responses, {"solution": solution}, ignore_case=True)
    assert ignored == [1, 1, 0, 1, 0, 1, 0]


def test_math_answer():
    rows = [
        ("3 + 4 is 7.", "7", 1),
        ("The answer is 1,000", "She earns 10 * 100.\n#### 1000", 1),
        ("\\boxed{\\frac{1}{2}}, so 3", "0.5", 1),
        ("so \\boxed{2 } it is", "One and one: \\boxed{2}.", 1),
        ("8", 7, 0),
        ("", "7", 0),
        ("\\boxed{None}", None, 0),
    ]
    responses, solution, expected = map(list, zip(*rows, strict=True))
    assert scores("math_answer", responses, {"solution": solution}) == expected
    # After a marker alone.
    responses = ["3 + 4 = 7\n#### 7", "#### 5, no:\n#### $7.", "so 7", "\\boxed{7}", "7 ####"]
    kept = {"solution": ["3 + 4 = 7\n#### 7"] * len(responses)}
    assert scores("math_answer", responses, kept, marker="####") == [1, 1, 0, 0, 0]


def test_format_match_and_length_bounds():
    responses = ["<think>a\nb</think>\n7 ", "<think>a", "x <think></think>"]
    assert scores("format_match", responses, pattern="<think>.*</think>.*") == [1, 0, 0]
    responses = ["", " a ", "abc", "abcd"]
    assert scores("length_bounds", responses) == [0, 1, 1, 1]
    assert scores("length_bounds", responses, min_characters=2, max_characters=3) == [0, 0, 1, 0]


SCHEMA = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}


def test_json_schema():
    responses = ['{"name": "Pia"}', 'So:\n```json\n{"name": "Pia"}\n```\nDone.', '{"name": 7}']
    responses += ["no JSON", "[" * 100_000]
    assert scores("json_schema", responses, schema=SCHEMA) == [1, 1, 0, 0, 0]
    # JSON has no such numbers.
    numbers = ["NaN", "[Infinity]", "-Infinity", "1e999", "1e9"]
    assert scores("json_schema", numbers, schema={"type": ["number", "array"]}) == [0, 0, 0, 0, 1]
    # Which of two values counts?
    twice = ['{"name": 7, "name": "Pia"}', '{"name": "Pia", "more": [{"a": 1, "a": 1}]}']
    assert scores("json_schema", twice, schema=SCHEMA) == [0, 0]
    # Another draft, which a schema may name.
    draft = {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}]}
    assert scores("json_schema", ['["a"]', "[1]"], schema=draft) == [1, 0]
    # One for each row.
    schemas = ['{"type": "integer"}', {"type": "string"}, None]
    assert scores("json_schema", ["7", "7", "7"], {"schema": schemas}) == [1, 0, 0]


def test_no_response_can_end_or_hold_up_a_training(monkeypatch, capfd):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    started, handler = time.monotonic(), signal.getsignal(signal.SIGALRM)
    # No float holds the integer; the pattern takes 2^40 steps.
    assert scores("json_schema", ["1" + "0" * 400, "4"], schema={"multipleOf": 0.5}) == [0, 1]
    hangs = f'"{"a" * 40}!"'
    assert scores("json_schema", [hangs, '"aa"'], schema={"pattern": "^(a+)+$"}) == [0, 1]
    assert scores("format_match", [hangs, '"aa"'], pattern='"(a+)+"') == [0, 1]
    assert time.monotonic() - started < 10
    assert signal.getsignal(signal.SIGALRM) == handler
    log = capfd.readouterr().err
    assert "scored 0: has_schema: OverflowError: " in log
    assert "scored 0: has_format: TimeLimit: took more than 0.2 s" in log


def test_unit_tests():
    right = "def add(a, b):\n    return a + b\n"
    responses = [
        right,
        f"Sure:\n```python\n{right}```\nIt adds.",
        # The last block counts.
        f"```python\n{right}```\n```\ndef add(a, b):\n    return 0\n```",
        "I do not know.",
        right,
        "while True: pass",
    ]
    test = "assert add(1, 2) == 3"
    tests = [test, [test, "assert add(0, 0) == 0"], test, test, "assert add(1, 2) == 4", test]
    assert scores("unit_tests", responses, {"tests": tests}, seconds=1) == [1, 1, 0, 0, 0, 0]
    assert scores("unit_tests", [right] * 2, {"tests": [None, []]}) == [0, 0]
