"""Answers of mathematical problems: where they are, and which are equal."""

import pytest

from snakechat.evaluation.answers import answer_of, are_equal


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She pays $1,234.50 in total", "1,234.50"),
        ("The temperature is -4 degrees", "-4"),
        ("It is .5", ".5"),
        # A list of numbers, not a number with thousands.
        ("7,8", "8"),
        ("First 1, and then \\boxed{2}, not 3", "2"),
        ("\\boxed{1} or rather \\boxed {x_{1}^{2}}", "x_{1}^{2}"),
        ("\\boxed{\\frac{1}{2}} of 10", "\\frac{1}{2}"),
        # Cut off at the maximum length.
        ("It is \\boxed{12", "12"),
        ("no answer", None),
    ],
)
def test_the_answer_of_a_text(text, answer):
    assert answer_of(text) == answer


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ("1" * 10_000, "1" * 10_000, True),
        ("1,000", "1000.0", True),
        ("50\\%", "50", True),
        ("1/2", "0.5", True),
        ("\\frac{1}{2}", "0.5", True),
        (" x + 1", "x+1", True),
        ("\\text{Paris}.", "Paris", True),
        ("\\left( 1, 2 \\right)", "(1,2)", True),
        ("1/3", "0.333", False),
        ("x+1", "x+2", False),
        ("1/0", "0", False),
        ("1" * 10_000, "1" * 9_999 + "2", False),
    ],
)
def test_equal_answers(first, second, equal):
    assert are_equal(first, second) is are_equal(second, first) is equal
