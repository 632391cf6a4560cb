"""Numbers, durations and intervals as text, in the same form on all pages."""

import math
from typing import Any


def format_number(value: float) -> str:
    """Format a number: integers with thousands separators, others with four significant digits."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_percent(fraction: float) -> str:
    """Format a fraction as a percentage with one decimal."""
    return f"{fraction:.1%}".replace("%", " %")


def format_duration(seconds: float) -> str:
    """Format seconds as h:mm:ss; less than a minute as seconds with one decimal."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def format_cell(value: Any) -> str:
    """Format a cell of a table: text as it is, numbers by format_number, None as an empty cell."""
    if value is None:
        return ""
    return value if isinstance(value, str) else format_number(value)


def format_significant(value: float, signed: bool = False) -> str:
    """Format a number with three significant digits, as the HTML pages show it.

    Integers keep all digits, with thousands separators. Negative numbers have a real minus sign.

    Args:
        signed: Give positive numbers a plus sign, as differences have.
    """
    if isinstance(value, int):
        text = f"{abs(value):,}"
    elif not math.isfinite(value):
        return str(value)
    elif value == 0:
        text = "0"
    elif 1e-4 <= abs(value) < 1e7:
        # Rounding may add a digit: 0.9996 is 1.00.
        rounded = float(f"{abs(value):.2e}")
        decimals = max(2 - math.floor(math.log10(rounded)), 0)
        text = f"{rounded:,.{decimals}f}"
    else:
        text = f"{abs(value):.2e}"
    return sign_of(value, signed) + text


def sign_of(value: float, signed: bool) -> str:
    """Return the sign in front of a number: a real minus, or a plus if positive numbers have it."""
    return "\N{MINUS SIGN}" if value < 0 else "+" if signed and value > 0 else ""


def format_share(fraction: float, signed: bool = False) -> str:
    """Format a fraction in percent with one decimal, a difference (signed) in percentage points."""
    unit = "pp" if signed else "%"
    return f"{sign_of(fraction, signed)}{abs(fraction) * 100:.1f}\N{NO-BREAK SPACE}{unit}"


def format_memory(megabytes: float) -> str:
    """Format memory, from 1000 MB on in GB."""
    if megabytes < 1000:
        return f"{megabytes:.0f}\N{NO-BREAK SPACE}MB"
    return f"{format_significant(megabytes / 1000)}\N{NO-BREAK SPACE}GB"
