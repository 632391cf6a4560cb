r"""Answers of mathematical problems: where a response states its answer, and equal answers.

The answer of a text is the content of its last \boxed{...} or, without one, its last number.
"""

import re
from fractions import Fraction

# 1,234 or 1234, with decimals; or a fraction of two integers.
NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|-?\.\d+")
BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
# TeX that changes how an answer looks and not what it is.
LAYOUT = re.compile(r"\\(?:left|right|displaystyle|[,;:!]|text|mathrm)|[\s${}]|\\[%$]|[°%]|\.$")
TEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
# A number with more digits is compared as text.
MAX_DIGITS = 100


def answer_of(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} of a text, or its last number, or None."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else None


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
    """Return whether two answers are equal as numbers or, if one is none, as normalized text."""
    texts = normalized(first), normalized(second)
    numbers = [number_of(text) for text in texts]
    if None in numbers:
        return texts[0] == texts[1]
    return numbers[0] == numbers[1]


def normalized(answer: str) -> str:
    """Return an answer without what changes only its layout."""
    return LAYOUT.sub("", TEX_FRACTION.sub(r"\1/\2", answer.strip()))


def number_of(text: str) -> Fraction | None:
    """Return the exact value of a number; None for any other text."""
    if len(text) > MAX_DIGITS or not NUMBER.fullmatch(text):
        return None
    numerator, _, denominator = text.replace(",", "").partition("/")
    if denominator and not int(denominator):
        return None
    return Fraction(numerator) / int(denominator or 1)
