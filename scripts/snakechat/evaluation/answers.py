r"""Answers of mathematical problems: where a response states its answer, and equal answers.

The answer of a text is the content of its last \boxed{...} or, without one, its last number.
"""

import re
from fractions import Fraction
from typing import NamedTuple

BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
# Signs, spaces and digits of typesetting.
CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00a0\u2007\u2009\u202f\u3000", " "),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        **{"\u2044": "/", "\u00d7": "*", "\u00b7": "*", "\u00b2": "^2", "\u00b3": "^3"},
        **{"\u00bc": " 1/4", "\u00bd": " 1/2", "\u00be": " 3/4"},
    }
)
# TeX that changes how an answer looks and not what it is.
TEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))", r" \1\2/\3\4"),
        (r"\{,\}", ","),
        (r"\\(?:left|right|displaystyle|!)", ""),
        (r"\\[,;: ]|~", " "),
        (r"\\(?:times|cdot)(?![a-zA-Z])", "*"),
        (r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r" \1 "),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°", " degrees"),
        (r"\\?%", " percent"),
        (r"\\?\$|\\[()\[\]]|[€£¥]|\*\*", ""),
    )
]
# 1,234 or 1 234 or 1234, with decimals and a power of ten; a fraction, a mixed number, or a power.
INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,3}(?: \d{3})+(?!\d)|\d+)"
EXPONENT = r"\^\s*\{?(?P<exponent>[+-]?\d+)\}?"
UNSIGNED = (
    r"(?:(?P<whole>\d+) +)?(?P<numerator>\d+)\s*/\s*(?P<denominator>\d+)"
    rf"|(?P<base>\d+)\s*{EXPONENT}"
    rf"|(?P<decimal>{INTEGER}(?:\.\d+)?|\.\d+)"
    rf"(?:[eE](?P<scale>[+-]?\d+)|\s*\*\s*10\s*{EXPONENT.replace('exponent', 'power')})?"
)
NUMBER = re.compile(rf"(?<![\w.])(?:{UNSIGNED})")
ASSIGNMENT = re.compile(r"\s*[a-zA-Z](?:_\w+)?\s*=(?!=)")
# Words behind a number. A single letter is a unit only behind a space: it may be a variable.
UNIT = re.compile(
    r"(?: *[a-zA-Zµ]{2,}| +[mgshLlJNWVAKCF](?!\w))[a-zA-Zµ ./]*(?:\^\{?[23]\}?)?[ .]*"
)
# Words that are no units.
VALUES = re.compile(
    r"\b(?:pi|sqrt|inf|infinity|sin|cos|tan|log|ln|exp|and|or|to|hundred|thousand|million|billion)"
)
# Numbers with more digits or larger exponents are compared as text.
MAX_DIGITS, MAX_EXPONENT = 100, 400


class Quantity(NamedTuple):
    """The exact value of a number, and its unit in lower case; empty if it has none."""

    value: Fraction
    unit: str


def answer_of(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} of a text, or its last number, or None."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    text = plain(text)
    numbers = list(NUMBER.finditer(text))
    if not numbers:
        return None
    number = numbers[-1].group()
    return f"-{number}" if _is_negative(text[: numbers[-1].start()]) else number


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} of a text; None if its braces do not match."""
    starts = list(BOXED.finditer(text))
    if not starts:
        return None
    depth, start = 1, starts[-1].end()
    for index in range(start, len(text)):
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return text[start:index]
    return None


def are_equal(first: str, second: str) -> bool:
    """Return whether two answers are equal as numbers, as tuples or, if they are none, as text.

    A unit counts if both have one: 5 cm is 5 and not 5 km.
    """
    first, second = plain(first), plain(second)
    quantities = quantity_of(first), quantity_of(second)
    if quantities[0] and quantities[1]:
        units = {quantity.unit for quantity in quantities if quantity and quantity.unit}
        return quantities[0].value == quantities[1].value and len(units) < 2
    if as_text(first) == as_text(second):
        return True
    items = items_of(first), items_of(second)
    return (
        len(items[0]) == len(items[1]) > 1
        and as_text(first)[0] == as_text(second)[0]
        and as_text(first)[-1] == as_text(second)[-1]
        and all(map(are_equal, *items))
    )


def plain(text: str) -> str:
    """Return a text without what changes only its layout."""
    text = text.translate(CHARACTERS)
    for pattern, replacement in TEX:
        text = pattern.sub(replacement, text)
    return text.strip()


def as_text(answer: str) -> str:
    """Return an answer as text is compared: without spaces, braces, case of words, and a period."""
    text = re.sub(r"[\s{}]|\.$", "", answer)
    text = ASSIGNMENT.sub("", text, count=1)
    if choice := re.fullmatch(r"\(([a-zA-Z])\)", text):
        text = choice[1]
    return text.lower() if text.isalpha() else text


def items_of(answer: str) -> list[str]:
    """Return the items of a tuple, an interval or a list in brackets; nothing for other answers."""
    answer = ASSIGNMENT.sub("", answer, count=1).strip()
    bracketed = re.fullmatch(r"[(\[](.*)[)\]]", answer, re.DOTALL)
    return bracketed[1].split(",") if bracketed else []


def quantity_of(text: str) -> Quantity | None:
    """Return the number that a plain text is, alone or with a unit; None for any other text."""
    text = ASSIGNMENT.sub("", text, count=1).strip()
    if bracketed := re.fullmatch(r"[({](.*)[)}]", text):
        text = bracketed[1].strip()
    sign = -1 if text.startswith("-") else 1
    found = NUMBER.match(text.lstrip("+-").lstrip()) if text[:2] not in ("--", "-+") else None
    if not found or len(text) > MAX_DIGITS:
        return None
    rest = found.string[found.end() :]
    if rest.strip(" .") and (not UNIT.fullmatch(rest) or VALUES.search(rest.lower())):
        return None
    value = _value(found)
    unit = re.sub(r"[\s{}.]", "", rest).lower().rstrip("s")
    return None if value is None else Quantity(sign * value, unit)


def _value(number: re.Match[str]) -> Fraction | None:
    """Return the value of a match of NUMBER; None without one, or if it is too large."""
    parts = number.groupdict()
    if parts["denominator"]:
        if not int(parts["denominator"]):
            return None
        fraction = Fraction(int(parts["numerator"]), int(parts["denominator"]))
        return int(parts["whole"] or 0) + fraction
    exponent = int(parts["exponent"] or parts["scale"] or parts["power"] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    if parts["base"]:
        base = int(parts["base"])
        return Fraction(base) ** exponent if base or exponent >= 0 else None
    return Fraction(re.sub("[, ]", "", parts["decimal"])) * Fraction(10) ** exponent


def _is_negative(before: str) -> bool:
    """Return whether the text before a number ends in its sign; a hyphen may stand between two."""
    rest = before.rstrip()
    if not rest.endswith("-"):
        return False
    operand = rest[:-1].rstrip()[-1:]
    if before != rest:
        # A dash behind a space and before one starts an item of a list.
        return operand in ("=", "(", ",", "<", ">")
    return not (operand.isdigit() or operand in (")", "]", "}") or rest[-2:-1].isalpha())
