"""Answers of mathematical problems: where they are, and which are equal."""

import pytest

from snakechat.evaluation.answers import answer_of, are_equal


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She pays $1,234.50 in total", "1,234.50"),
        ("The temperature is -4 degrees", "-4"),
        ("x = \u22125, so", "-5"),
        ("x=-5", "-5"),
        ("(-5)", "-5"),
        # A hyphen between two numbers, behind a letter, or before an item of a list.
        ("see pages 2-5", "5"),
        ("see pages 2\u20135", "5"),
        ("10 - 5", "5"),
        ("COVID-19", "19"),
        ("It needs:\n- 5 apples", "5"),
        ("It is .5", ".5"),
        ("It costs 1\u202f000 euros", "1 000"),
        ("It weighs 2 1/2 pounds", "2 1/2"),
        ("about 1.5e3.", "1.5e3"),
        ("The answer is \\(\\frac{7}{3}\\).", "7/3"),
        ("**7**", "7"),
        ("\uff15", "5"),
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


EQUAL = [
    ("1" * 10_000, "1" * 10_000),
    ("1,000", "1000.0"),
    ("1 000", "1000"),
    ("1\u00a0000", "1000"),
    ("1\u202f000\u202f000", "1,000,000"),
    ("1{,}000", "1000"),
    ("1\\,000", "1000"),
    ("2 1/2", "2.5"),
    ("2\\frac{1}{2}", "2.5"),
    ("2\u00bd", "5/2"),
    ("1.5e3", "1500"),
    ("1.5E-3", "0.0015"),
    ("1.5 \\times 10^3", "1500"),
    ("1.5\u00d710^{3}", "1500"),
    ("10^3", "1000"),
    ("2^{10}", "1024"),
    ("\u22125", "-5"),
    ("+5", "5"),
    ("05", "5"),
    ("x=5", "5"),
    ("x_1 = 5", "5"),
    ("y = 2x + 1", "2x+1"),
    ("5\\text{ cm}", "5"),
    ("5 \\mathrm{~kg}", "5"),
    ("5\\,\\text{cm}^2", "5"),
    ("5 km/h", "5"),
    ("5 apples", "5 apple"),
    ("5 m", "5"),
    ("50\\%", "50"),
    ("75 percent", "75%"),
    ("\\$5", "5"),
    ("90^\\circ", "90"),
    ("90\u00b0", "90"),
    ("1/2", "0.5"),
    ("\\frac{1}{2}", "0.5"),
    ("\\dfrac12", "1/2"),
    ("\\tfrac{1}2", "1/2"),
    ("-\\frac{3}{4}", "-0.75"),
    ("(5)", "5"),
    (".5", "1/2"),
    (" x + 1", "x+1"),
    ("\\text{Paris}.", "paris"),
    ("(B)", "B"),
    ("\\frac{\\pi}{2}", "\\pi/2"),
    ("\\left( 1, 2 \\right)", "(1,2)"),
    ("(1, 0.5)", "(1,\\frac12)"),
    ("[0, 1)", "[0,1)"),
]
DIFFERENT = [
    ("1/3", "0.333"),
    ("x+1", "x+2"),
    ("1/0", "0"),
    ("-5", "5"),
    ("5 cm", "5 km"),
    ("5x", "5"),
    ("5 x", "5"),
    ("5\\pi", "5"),
    ("5 pi", "5"),
    ("5 million", "5"),
    ("75%", "0.75"),
    ("2,5", "2.5"),
    ("2-5", "-5"),
    ("2-5", "5"),
    ("5 or 6", "5"),
    ("(1,2)", "(2,1)"),
    ("[0,1)", "(0,1)"),
    ("A", "B"),
    ("9^{9999999}", "9"),
    ("1e999999999", "1"),
    ("1" * 10_000, "1" * 9_999 + "2"),
    ("", "5"),
]


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [(*pair, True) for pair in EQUAL] + [(*pair, False) for pair in DIFFERENT],
)
def test_equal_answers(first, second, equal):
    assert are_equal(first, second) is are_equal(second, first) is equal
