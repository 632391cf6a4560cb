"""Texts of pages in the language of the program, and values as people read them."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

# Literal paths, by which code digests find the tables that a program reads.
TABLES = Path(__file__).parent / "tables"
TEXTS: dict[str, dict[str, str]] = yaml.safe_load((TABLES / "texts.yaml").read_text("utf-8"))
# English name, Chinese name and, of metrics, form and better direction, by group and key.
NAMES: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(
    (TABLES / "metrics.yaml").read_text("utf-8")
)
# Significant digits of a number, and the most that an interval asks for.
DIGITS, MAX_DIGITS = 3, 8

_language = "en"


def set_language(language: str) -> None:
    """Have translate() and name_of() return texts in a language (en or zh) from now on."""
    global _language
    _language = language


def translate(key: str, /, **values: object) -> str:
    """Return a text of TEXTS in the language of the program.

    Args:
        key: A literal, so that the test finds it.
        values: What replaces the {placeholders} of the text.
    """
    return TEXTS[key][_language].format(**values)


def in_language(names: Mapping[str, Any]) -> str:
    """Return a name, by languages, in the language of the program."""
    return str(names[_language])


def name_of(group: str, key: str) -> str:
    """Return the name of a key of NAMES in the language of the program; others are their names."""
    return in_language(NAMES[group].get(key, {_language: key}))


def format_number(value: float, signed: bool = False, digits: int = DIGITS) -> str:
    """Format a number with three significant digits; integers keep all digits.

    Negative numbers have a real minus sign.

    Args:
        signed: Give positive numbers a plus sign, as differences have.
        digits: Significant digits.
    """
    sign = "+" if signed and value else ""
    if isinstance(value, int):
        text = f"{value:{sign},}"
    elif value and math.isfinite(value) and 1e-4 <= abs(value) < 1e7:
        # Rounding may add a digit: 0.9996 is 1.00.
        rounded = float(f"{value:.{digits - 1}e}")
        magnitude = math.floor(math.log10(abs(rounded)))
        text = f"{rounded:{sign},.{max(digits - 1 - magnitude, 0)}f}"
    else:
        text = f"{value:{sign}.{digits - 1}e}" if value and math.isfinite(value) else f"{value:g}"
    return text.replace("-", "\N{MINUS SIGN}", 1) if value < 0 else text


def format_cell(value: Any) -> str:
    """Format a cell of a table: text as it is, numbers by format_number, None as an empty cell."""
    if value is None:
        return ""
    return value if isinstance(value, str) else format_number(value)


def as_text(value: Any) -> str:
    """Return a setting as text: strings as they are, all others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def format_share(value: float, signed: bool = False) -> str:
    """Format a fraction in percent, or a difference (signed) in percentage points."""
    unit = "pp" if signed else "%"
    text = f"{100 * value:{'+' if signed and value else ''}.1f}\N{NO-BREAK SPACE}{unit}"
    return text.replace("-", "\N{MINUS SIGN}")


def format_duration(seconds: float) -> str:
    """Format seconds as h:mm:ss; less than a minute as seconds with one decimal."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def format_models(models: Mapping[str, Mapping[str, int]]) -> str:
    """Return the sizes of the trained models as text."""
    return "; ".join(translate("model_size", name=name, **of) for name, of in models.items())


# How the forms in NAMES are written. Its group `units` has further forms. Without a form,
# format_number writes floats, and as_text any other value.
FORMS: dict[str, Callable[[Any], str]] = {
    "share": format_share,
    "duration": format_duration,
    "integer": "{:,.0f}".format,
    "models": format_models,
    "time": lambda text: text[:16].replace("T", " "),
}


def run_value(key: str, value: Any) -> str:
    """Return a value of run.json or of facts as text; None is empty."""
    if value is None:
        return ""
    form = NAMES["run"].get(key, {}).get("form", "")
    if form in NAMES["units"]:
        number = format_number(value / float(NAMES["units"][form]["size"]))
        return name_of("units", form).format(number)
    other = format_number if isinstance(value, float) else as_text
    return FORMS.get(form, other)(value)
