r"""Answers of mathematical problems: where a response states its answer, and equal answers.

The answer of a text is the content of its last \boxed{...} or, without one, its last number.
"""

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
# What NFKC leaves of typesetting.
CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2012\u2013", "-"),
        **dict.fromkeys("\u00d7\u00b7\u22c5\u2217", "*"),
        **{"\u2044": "/", "\u00f7": "/", "\u2019": "'", "\u3002": "."},
    }
)
SYMBOLS = {
    **{"pi": "π", "pm": "±", "infty": "∞", "times": "*", "cdot": "*", "div": "/", "in": "∈"},
    **{"le": "≤", "leq": "≤", "leqslant": "≤", "ge": "≥", "geq": "≥", "geqslant": "≥"},
    **{"ne": "≠", "neq": "≠", "cup": "\u222a", "dfrac": r"\frac", "tfrac": r"\frac"},
    **{"lt": "<", "gt": ">"},
}
# TeX that changes how an answer looks and not what it is.
TEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # The next row of a matrix.
        (r"\\\\", ";"),
        (r"(?<=\d)\*\*(?=\d)", "^"),
        (r"(?<=\d)(?=\\[dt]?frac)", " "),
        (r"\{,\}", ","),
        (r"\\(?:left|right|displaystyle|boxed)(?![a-zA-Z])|\\!", ""),
        (r"\\(?:[,;: ]|q?quad(?![a-zA-Z]))|~", " "),
        (r"\\(?:text|math|mbox|operatorname)[a-z]*\s*\{([^{}]*)\}", r" \1 "),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°", " degrees"),
        (r"\\?%", " percent"),
        (r"\\?\$|\\[()\[\]]|[€£¥₹]|\*\*", ""),
    )
]
# A fraction or a root of operands without braces.
OPERAND = r"\s*(?:\{([^{}]*)\}|(\d|[a-zA-Z]))"
FRACTION = re.compile(rf"\\frac{OPERAND}{OPERAND}")
ROOT = re.compile(r"(?:\\sqrt|√)\s*(?:\{([^{}]*)\}|(\d+|[a-zA-Zπ]))")
# 1,234 or 1 234 or 1'234 or 1234, with decimals and a power of ten; a fraction, a mixed number, or
# a power.
INTEGER = r"(?:[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+|(?:'\d{3})+)(?!\d)|\d+)"
EXPONENT = r"\^\s*\{?(?P<exponent>[+-]?\d+)\}?"
UNSIGNED = (
    r"(?:(?P<whole>\d+) +)?(?P<numerator>\d+)\s*/\s*(?P<denominator>-?\d+)"
    rf"|(?P<base>\d+)\s*{EXPONENT}"
    rf"|(?P<decimal>{INTEGER}(?:\.\d+)?|\.\d+)"
    rf"(?:[eE](?P<scale>[+-]?\d+)|\s*[*x]\s*10\s*{EXPONENT.replace('exponent', 'power')})?"
)
NUMBER = re.compile(rf"(?<![a-zA-Z\d.])(?<![a-zA-Z]_)(?:{UNSIGNED})")
ASSIGNMENT = re.compile(r"\s*[a-zA-Z](?:_\w+|_\{\w+\}|\(\w\))?\s*(?:=(?!=)|∈)")
# Words behind a number: those of one or two letters, and those without a space, may be variables.
UNIT = re.compile(
    r"(?: +[a-zA-Zμ]{3,}| +[mgshLlJNWVAKCF](?!\w)| *[一-鿿]+"
    r"| *(?:[kcdmμMG][mglLsJNWVA]|ft|in|mi|yd|lbs?|oz|mph|min|hrs?|[ap]m|Hz|Pa|USD|sq)(?![a-zA-Z]))"
    r"[a-zA-Zμ ./一-鿿]*(?:\^\{?[23]\}?)?[ .]*"
)
# Words that are not units.
VALUES = re.compile(
    r"\b(?:pi|sqrt|inf|infinity|sin|cos|tan|log|ln|exp|and|or|to|not|over|times|plus|minus|squared"
    r"|cubed|factorial|half|halves|thirds?|(?:dozen|hundred|thousand|million|billion|trillion)s?)\b"
    r"|[十百千万亿半](?![克米瓦卡帕])"
)
# Powers of units as words.
SQUARED = re.compile(r"\b(?:square|sq)\b[. ]*(\w+)|(\w+) +squared\b")
CUBED = re.compile(r"\bcubic *(\w+)|(\w+) +cubed\b")
# Words of units whose symbol is their first letter.
UNIT_WORDS = re.compile("kilo|centi|milli|(?:met(?:er|re)|gram|lit(?:er|re)|hour|second)s?")
# What the spelling of a unit may have besides: a plural (of two letters, ms is a unit), spaces.
UNIT_SPELLING = re.compile(r"(?<=\w\w)s\b|[\s{}.]")
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
    """Return whether two answers are equal as numbers, as lists or, if they are none, as text.

    A unit counts if both have one: 5 cm is 5 and not 5 km. Sets and lists without brackets have no
    order; nor does the name of a variable count, unless the items of both have one: a=5, b=6.
    3,5 is a list; as the first answer, it also equals a second one of 3.5.
    """
    first, second = plain(first), plain(second)
    quantities = quantity_of(first), quantity_of(second)
    if not quantities[0] and quantities[1] and quantities[1].value.denominator > 1:
        quantities = quantity_of(first.replace(",", ".")), quantities[1]
    if quantities[0] and quantities[1]:
        units = {quantity.unit for quantity in quantities if quantity and quantity.unit}
        return quantities[0].value == quantities[1].value and len(units) < 2
    if as_text(first) == as_text(second):
        return bool(as_text(first))
    (brackets, *items), (others, *other_items) = items_of(first), items_of(second)
    if brackets not in ("()", "[]", "[)", "(]"):
        items.sort(key=_order)
        other_items.sort(key=_order)
    return (
        brackets == others
        and len(items) == len(other_items) > 1
        and all(
            are_equal(item, other) and _are_compatible(_name(item), _name(other))
            for item, other in zip(items, other_items, strict=True)
        )
    )


def _order(item: str) -> tuple[str, str]:
    return str(quantity_of(plain(item)) or as_text(item)), _name(item)


def _name(item: str) -> str:
    """Return the variable that an item has the value of, or an empty text."""
    assignment = ASSIGNMENT.match(item)
    return re.sub(r"[\s{}=∈]", "", assignment[0]) if assignment else ""


def _are_compatible(name: str, other: str) -> bool:
    """Return whether names may be the same variable's: x also is x_1, with the number of a root."""
    return name.startswith(other) or other.startswith(name)


def plain(text: str) -> str:
    """Return a text without what changes only its layout."""
    # NFKC makes mere digits of exponents, and 21/2 of 2½.
    text = re.sub("[\u2070-\u207b\u00b9\u00b2\u00b3]+", r"^{\g<0>}", text)
    text = re.sub(r"(?<=\d)[\u00bc-\u00be\u2150-\u215e]", r" \g<0>", text)
    text = unicodedata.normalize("NFKC", text).translate(CHARACTERS)
    for pattern, replacement in TEX:
        text = pattern.sub(replacement, text)
    text = re.sub(r"\\([a-zA-Z]+)", lambda name: SYMBOLS.get(name[1], name[0]), text)
    before = ""
    while text != before:
        before, text = text, FRACTION.sub(r"(\1\2)/(\3\4)", ROOT.sub(r"√(\1\2)", text))
    # Operands that need no parentheses.
    text = re.sub(r"(?<![\w)√])\((-?[^()+/±-]*(?:√\(\w+\))?)\)/", r"\1/", text)
    text = re.sub(r"/\((-?\d+|\w|√\(\w+\))\)", r"/\1", text)
    return text.strip()


def as_text(answer: str) -> str:
    """Return an answer as text is compared: without spaces, case of words, + and a last period.

    Braces around one operand go, others become parentheses.
    """
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)|\.$|^\+", "", answer)
    text = ASSIGNMENT.sub("", text, count=1)
    text = re.sub(r"(?<!\\)\{(-?\d+|\w|)\}", r"\1", text)
    text = re.sub(r"(?<!\\)\{([^{}]*)\}", r"(\1)", text)
    if choice := re.fullmatch(r"\(([a-zA-Z])\)", text):
        text = choice[1]
    return text.lower() if text.isalpha() else text


def items_of(answer: str) -> list[str]:
    """Return the brackets of a tuple, an interval, a set or, empty, a list, and then its items."""
    answer = answer.strip().replace("\\{", "{").replace("\\}", "}")
    if len(re.findall("[=∈]", answer)) < 2:
        answer = ASSIGNMENT.sub("", answer, count=1).strip()
    # A comma that is not within brackets.
    comma = re.compile(r"(?:, *(?:or|and)\b|,|\b(?:or|and)\b)(?![^()\[\]{}]*[)\]}])")
    bracketed = re.fullmatch(r"([(\[{])(.*)([)\]}])", answer, re.DOTALL)
    if bracketed and not comma.search(answer):
        return [bracketed[1] + bracketed[3], *comma.split(bracketed[2])]
    return ["", *comma.split(answer)]


def quantity_of(text: str) -> Quantity | None:
    """Return the number that a plain text is, alone or with a unit; None for any other text."""
    text = ASSIGNMENT.sub("", text, count=1).strip()
    if bracketed := re.fullmatch(r"\\?[({]([^,]*?)\\?[)}]", text):
        text = bracketed[1].strip()
    sign = -1 if text.startswith("-") else 1
    found = NUMBER.match(text.lstrip("+-").lstrip()) if text[:2] not in ("--", "-+") else None
    if not found or len(text) > MAX_DIGITS:
        return None
    rest, value = found.string[found.end() :], _value(found)
    unit = CUBED.sub(r"\1\2^3", SQUARED.sub(r"\1\2^2", rest.lower()))
    if rest.strip(" .") and (not UNIT.fullmatch(rest) or VALUES.search(unit)):
        return None
    unit = UNIT_WORDS.sub(lambda word: word[0][0], re.sub(r"\bper\b", "/", unit))
    unit = UNIT_SPELLING.sub("", unit)
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
    return Fraction(re.sub(r"[, ']", "", parts["decimal"])) * Fraction(10) ** exponent


def _is_negative(before: str) -> bool:
    """Return whether the text before a number ends in its sign; a hyphen may stand between two."""
    rest = before.rstrip()
    if not rest.endswith("-"):
        return False
    operand = rest[:-1].rstrip()[-1:]
    if before != rest:
        # A dash behind a space and before one starts an item of a list.
        return operand in ("=", "(", ",", "<", ">", "#")
    return not (operand.isdigit() or operand in (")", "]", "}") or re.search(r"[a-zA-Z]-$", rest))
