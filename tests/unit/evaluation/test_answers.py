"""Answers of mathematical problems: where they are, and which are equal."""

import pytest

from snakechat.evaluation.answers import answer_of, are_equal


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("She pays $1,234.50 in total", "1,234.50"),
        ("x = \u22125, so", "-5"),
        ("#### - 5", "-5"),
        # A hyphen between two numbers, behind a letter, or before an item of a list.
        ("see pages 2-5", "5"),
        ("COVID-19", "19"),
        ("It needs:\n- 5 apples", "5"),
        ("It is .5", ".5"),
        ("It costs 1\u202f000 euros", "1 000"),
        ("It weighs 2 1/2 pounds", "2 1/2"),
        ("about 1.5e3.", "1.5e3"),
        ("It is \u2212\u00bd", "-1/2"),
        ("**7**", "7"),
        ("\u7b54\u6848\u662f\uff15\u3002", "5"),
        ("\u7b54\u6848\uff1a\uff13\uff0f\uff14", "3/4"),
        ("1\u2019234\u2019567 people", "1'234'567"),
        ("\\boxed5", "5"),
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


# Each answer of a row equals the first one.
EQUAL = [
    ("1" * 10_000, "1" * 10_000),
    ("1000", "1 000", "1\u00a0000", "1{,}000", "10**3"),
    ("2.5", "5/2", "2 1/2", "2\\frac{1}{2}", "2\u00bd"),
    ("1500", "1.5e3", "1.5 \\times 10^3"),
    ("5", "x=5", "5\\text{ cm}", "5 \\mathrm{~kg}", "\\$5", "(5)", "5\\quad"),
    ("5 apple", "5 apples"),
    ("50", "50\\%"),
    ("75%", "75 percent"),
    ("90", "90^\\circ", "90\u00b0"),
    ("x_1=1, x_2=2", "x_{2}=2, x_{1}=1"),
    ("1/2", "\\dfrac12"),
    ("-0.75", "\\frac{3}{-4}"),
    ("paris", "\\text{Paris}."),
    ("B", "(B)"),
    ("(1,2)", "\\left( 1, 2 \\right)"),
    ("3e8", "3\u00d710\u2078 m/s"),
    ("\\frac{\\sqrt{3}}{2}", "\\dfrac{\\sqrt3}{2}", "\\sqrt{3}/2"),
    ("\\tfrac1{1+\\tfrac1x}", "\\frac{1}{1+\\frac{1}{x}}"),
    ("3\u03c0/4", "\\frac{3\\pi}{4}"),
    ("\\pm 5", "\u00b15"),
    ("x\\leq5", "x \u2264 5"),
    ("(-\\infty,2)\\cup(3,\\infty)", "x \\in (-\\infty, 2) \\cup (3, \\infty)"),
    ("\\{1,2,3\\}", "\\{3, 2, 1\\}"),
    ("2", "\\{2\\}"),
    ("0.5,1", "1, \\frac12"),
    ("3, 5", "x=5 \\text{ or } x=3"),
    ("5, 6", "a=5, b=6"),
    ("x=2, x=1", "x_1=1, x_2=2"),
    ("3, 2, 1", "1, 2, \\text{ and } 3"),
    ("(-\\infty,\\infty)", "(-\\infty, +\\infty)"),
    ("\\begin{matrix}1&2\\\\3&4\\end{matrix}", "\\begin{matrix} 1 & 2 \\\\ 3 & 4 \\end{matrix}"),
    ("2x", "f(x) = 2x"),
    ("3.5", "3.5\u5343\u514b"),
    ("5cm", "5 centimeters"),
    ("7 cm^2", "7 square centimeters", "7 sq. cm", "7 cm squared"),
    ("60 km/h", "60 kilometers per hour"),
]
# Each differs from the first one.
DIFFERENT = [
    ("", ""),
    ("0.333", "1/3"),
    ("0", "1/0"),
    ("5 km", "5 cm"),
    ("5 m", "5 millimeters"),
    ("7", "7 squared"),
    ("5", "5x", "5 million", "5 dozen", "5 times x", "2-5", "5 or 6"),
    ("0.75", "75%"),
    ("(2,1)", "(1,2)"),
    ("(0,1)", "[0,1)"),
    ("9", "9^{9999999}"),
    ("1", "1e999999999"),
    ("1" * 9_999 + "2", "1" * 10_000),
    ("\\frac{1}{2}x", "\\frac{1}{2x}"),
    ("23", "2**3"),
    ("1200", "(1,200)"),
    ("12", "1 2", "12\u4e07"),
    ("1,2,2", "1,1,2"),
    ("\\{1,2\\}", "(1,2)"),
    ("a=5, b=6", "a=6, b=5"),
    ("a=5, b=5", "a=5, c=5"),
]


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        (first, other, table is EQUAL)
        for table in (EQUAL, DIFFERENT)
        for first, *others in table
        for other in others
    ],
)
def test_equal_answers(first, second, equal):
    assert are_equal(first, second) is are_equal(second, first) is equal


def test_a_comma_is_decimal_in_an_answer_where_a_fraction_is_expected():
    assert are_equal("3,5", "3.5") and are_equal("x = 3,5 cm", "3.5 cm")
    # Thousands, and lists.
    for answer, expected in (("3,500", "3.5"), ("1,234,5", "1234.5"), ("3.5", "3,5")):
        assert not are_equal(answer, expected)
