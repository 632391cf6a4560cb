r"""Answers of mathematical problems: where a response states its answer, and equal answers.

The answer of a text is the content of its last \boxed{...} or, without one, its last number.
"""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

Replacements = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]

# What NFKC leaves of typesetting.
CHARACTERS = str.maketrans(
    "\u2212\u2010\u2012\u2013\u00d7\u00b7\u22c5\u2217\u2044\u00f7\u2019\u3002", "----****//'."
)
COMMANDS = "pi pm infty times cdot div in cup lt gt le leq leqslant ge geq geqslant ne neq"
SYMBOLS = dict(zip(COMMANDS.split(), "π±∞**/∈\u222a<>≤≤≤≥≥≥≠≠", strict=True))
# TeX that changes how an answer looks and not what it is.
TEX: Replacements = (
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
    (r"\\([a-zA-Z]+)", lambda name: SYMBOLS.get(name[1], name[0])),
    (r"(?<=\d)\s*[*x]\s*10\s*\^\s*(?:\{([+-]?\d+)\}|([+-]?\d+))", r"e\1\2"),
)
# A fraction or a root of operands without braces.
OPERAND = r"\s*(?:\{([^{}]*)\}|(\d|[a-zA-Z]))"
FRACTION = re.compile(rf"\\[dt]?frac{OPERAND}{OPERAND}")
ROOT = re.compile(r"(?:\\sqrt|√)\s*(?:\{([^{}]*)\}|(\d+|[a-zA-Zπ]))")
# A fraction or a mixed number, a power, or a decimal: 1,234 or 1 234 or 1'234 or 1234, with an
# exponent.
INTEGER = r"(?:[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+|(?:'\d{3})+)(?!\d)|\d+)"
NUMBER = re.compile(
    r"(?<![a-zA-Z\d.])(?<![a-zA-Z]_)(?:(?:(\d+) +)?(\d+)\s*/\s*(-?\d+)"
    rf"|(\d+)\s*\^\s*\{{?([+-]?\d+)\}}?|({INTEGER}(?:\.\d+)?|\.\d+)(?:[eE]([+-]?\d+))?)"
)
# A dash behind a space and before one starts an item of a list; others join two words or numbers.
NEGATIVE = re.compile(r"[=(,<>#]\s*-\s+$|(?<![a-zA-Z])-$")
RANGE = re.compile(r"[\d)\]}]\s*-$")
ASSIGNMENT = re.compile(r"\s*[a-zA-Z](?:_\w+|_\{\w+\}|\(\w\))?\s*(?:=(?!=)|∈)\s*")
# Words behind a number: words of one or two letters, or without a space, may be variables.
# Some words are not units.
UNIT = re.compile(
    r"(?!.*(?i:\b(?:pi|sqrt|inf|infinity|sin|cos|tan|log|ln|exp|and|or|to|not|over|times|plus|minus"
    r"|squared|cubed|factorial|half|halves|thirds?|(?:dozen|hundred|thousand|[mbtr]+illion)s?)\b))"
    r"(?!.*[十百千万亿半](?![克米瓦卡帕]))"
    r"(?: +[a-zA-Zμ]{3,}| +[mgshLlJNWVAKCF](?!\w)| *[一-鿿]+"
    r"| *(?:[kcdmμMG][mglLsJNWVA]|ft|in|mi|yd|lbs?|oz|mph|min|hrs?|[ap]m|Hz|Pa|USD|sq)(?![a-zA-Z]))"
    r"[a-zA-Zμ ./一-鿿]*(?:\^\{?[23]\}?)?[ .]*"
)
# Powers and units as words.
SPELLINGS: Replacements = (
    (r"(?i)\b(?:square|sq)\b[. ]*(\w+)|(\w+) +squared\b", r"\1\2^2"),
    (r"(?i)\bcubic *(\w+)|(\w+) +cubed\b", r"\1\2^3"),
    (r"(?i)\bper\b", "/"),
    (
        r"(?i)(?:kilo|centi|milli(?!on))(?=[a-z])|(?:met(?:er|re)|gram|lit(?:er|re)|hour|second)s?",
        lambda word: word[0][0].lower(),
    ),
)
# Numbers with more digits or larger exponents are compared as text.
MAX_DIGITS, MAX_EXPONENT = 100, 400


def answer_of(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} of a text, or its last number, or None."""
    if (boxed := last_boxed(text)) is not None:
        return boxed
    text = plain(text)
    *_, number = [None, *NUMBER.finditer(text)]
    before = text[: number.start()] if number else ""
    is_negative = NEGATIVE.search(before) and not RANGE.search(before)
    return f"{'-' if is_negative else ''}{number[0]}" if number else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} of a text; None if its braces do not match."""
    starts = [found.end() for found in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]
    depth = 1
    for index in range(starts[-1], len(text)) if starts else ():
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return text[starts[-1] : index]
    return None


def are_equal(first: str, second: str) -> bool:
    """Return whether two answers are equal as numbers, as lists or, if they are none, as text.

    A unit counts if both have one: 5 cm is 5 and not 5 km. Sets and lists without brackets have no
    order; the name of a variable counts if the items of both have one: a=5, b=6. 3,5 is a list; as
    the first answer, it also equals a second one of 3.5.
    """
    first, second = plain(first), plain(second)
    ours, theirs = quantity_of(first), quantity_of(second)
    if not ours and theirs and theirs[0].denominator > 1:
        ours = quantity_of(first.replace(",", "."))
    if ours and theirs:
        return ours[0] == theirs[0] and len({ours[1], theirs[1]} - {""}) < 2
    if as_text(first) == as_text(second):
        return bool(as_text(first))
    (brackets, *items), (others, *other_items) = items_of(first), items_of(second)
    if brackets not in ("()", "[]", "[)", "(]"):
        for each in (items, other_items):
            each.sort(key=lambda item: (str(quantity_of(item) or as_text(item)), split_name(item)))
    if brackets != others or not len(items) == len(other_items) > 1:
        return False
    names = ([split_name(item)[0] for item in each] for each in (items, other_items))
    # x may be x_1, too: with the number of a root.
    return all(
        (name.startswith(other_name) or other_name.startswith(name)) and are_equal(*pair)
        for name, other_name, *pair in zip(*names, items, other_items, strict=True)
    )


def plain(text: str) -> str:
    """Return a text without what changes only its layout."""
    # NFKC makes mere digits of exponents, and 21/2 of 2½.
    text = re.sub("[\u2070-\u207b\u00b9\u00b2\u00b3]+", r"^{\g<0>}", text)
    text = re.sub(r"(?<=\d)[\u00bc-\u00be\u2150-\u215e]", r" \g<0>", text)
    text = unicodedata.normalize("NFKC", text).translate(CHARACTERS)
    for pattern, replacement in TEX:
        text = re.sub(pattern, replacement, text)
    before = ""
    while text != before:
        before, text = text, FRACTION.sub(r"(\1\2)/(\3\4)", ROOT.sub(r"√(\1\2)", text))
    # Operands that need no parentheses.
    text = re.sub(r"(?<![\w)√])\((-?[^()+/±-]*(?:√\(\w+\))?)\)/", r"\1/", text)
    return re.sub(r"/\((-?\d+|\w|√\(\w+\))\)", r"/\1", text).strip()


def split_name(answer: str) -> tuple[str, str]:
    """Return the variable that an answer has the value of, or an empty text, and the value."""
    found = ASSIGNMENT.match(answer)
    name = re.sub(r"[\s{}=∈]", "", found[0]) if found else ""
    return name, answer[found.end() if found else 0 :].strip()


def as_text(answer: str) -> str:
    """Return an answer as text is compared: without spaces, case of words, + and a last period.

    Braces around one operand go, others become parentheses.
    """
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)|\.$|^\+", "", split_name(answer)[1])
    text = re.sub(r"(?<!\\)\{(-?\d+|\w|)\}", r"\1", text)
    text = re.sub(r"(?<!\\)\{([^{}]*)\}", r"(\1)", text)
    text = re.sub(r"^\(([a-zA-Z])\)$", r"\1", text)
    return text.lower() if text.isalpha() else text


def items_of(answer: str) -> list[str]:
    """Return the brackets of a tuple, an interval, a set or, empty, a list, and then its items."""
    answer = answer.replace("\\{", "{").replace("\\}", "}")
    if len(re.findall("[=∈]", answer)) < 2:
        answer = split_name(answer)[1]
    # A comma that is not within brackets.
    comma = re.compile(r"(?:, *(?:or|and)\b|,|\b(?:or|and)\b)(?![^()\[\]{}]*[)\]}])")
    bracketed = re.fullmatch(r"([(\[{])(.*)([)\]}])", answer, re.DOTALL)
    if bracketed and not comma.search(answer):
        return [bracketed[1] + bracketed[3], *comma.split(bracketed[2])]
    return ["", *comma.split(answer)]


def quantity_of(text: str) -> tuple[Fraction, str] | None:
    """Return the number that a plain text is and its unit, or ""; None for any other text."""
    _, text = split_name(text)
    text = re.sub(r"^\\?[({]([^,]*?)\\?[)}]$", r"\1", text).strip()
    number = NUMBER.match(text, len(text) - len(re.sub(r"^[+-]?\s*", "", text)))
    value = _value(number) if number and len(text) <= MAX_DIGITS else None
    if number is None or value is None:
        return None
    unit = text[number.end() :]
    for pattern, replacement in SPELLINGS:
        unit = re.sub(pattern, replacement, unit)
    if unit.strip(" .") and not UNIT.fullmatch(unit):
        return None
    # Without plurals; ms is a unit.
    unit = re.sub(r"(?<=\w\w)s\b|[\s{}.]", "", unit.lower())
    return (-value if text.startswith("-") else value), unit


def _value(number: re.Match[str]) -> Fraction | None:
    """Return the value of a match of NUMBER; None without one, or if it is too large."""
    whole, numerator, denominator, base, power, decimal, scale = number.groups()
    exponent = int(power or scale or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    try:
        if numerator:
            return int(whole or 0) + Fraction(int(numerator), int(denominator))
        if base:
            return Fraction(int(base)) ** exponent
    except ZeroDivisionError:
        return None
    return Fraction(re.sub("[, ']", "", decimal)) * Fraction(10) ** exponent
