"""Numbers, durations and memory as text, in the same form on all pages."""

import math
from collections.abc import Sequence
from typing import Any

from snakechat.reporting.labels import is_fraction

# Significant digits of a number.
DIGITS = 3
# The most that an interval asks for.
MAX_DIGITS = 8


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


def format_metric(path: str, value: float, signed: bool = False, digits: int = DIGITS) -> str:
    """Format a metric: fractions in percent, differences (signed) in percentage points.

    digits: Significant digits, except of fractions.
    """
    if not is_fraction(path):
        return format_number(value, signed, digits)
    unit = "pp" if signed else "%"
    text = f"{100 * value:{'+' if signed and value else ''}.1f}\N{NO-BREAK SPACE}{unit}"
    return text.replace("-", "\N{MINUS SIGN}")


def format_estimate(
    path: str, value: float, interval: Sequence[float] | None, signed: bool = False
) -> tuple[str, str]:
    """Format a metric, and its interval in brackets; "" for None.

    Both have the digits in which the bounds of a narrow interval differ.
    """
    if interval is None:
        return format_metric(path, value, signed), ""
    digits = digits_of(interval)
    low, high = (format_metric(path, bound, signed, digits) for bound in interval)
    return format_metric(path, value, signed, digits), f"[{low}, {high}]"


def digits_of(interval: Sequence[float]) -> int:
    """Return the significant digits that bounds need to show the first digit of their distance."""
    low, high = interval
    largest, width = max(abs(low), abs(high)), high - low
    if not (math.isfinite(largest) and width > 0):
        return DIGITS
    digits = math.floor(math.log10(largest)) - math.floor(math.log10(width)) + 1
    return min(max(digits, DIGITS), MAX_DIGITS)


def format_duration(seconds: float) -> str:
    """Format seconds as h:mm:ss; less than a minute as seconds with one decimal."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def format_memory(megabytes: float) -> str:
    """Format memory, from 1000 MB on in GB."""
    if megabytes < 1000:
        return f"{megabytes:.0f}\N{NO-BREAK SPACE}MB"
    return f"{format_number(megabytes / 1000)}\N{NO-BREAK SPACE}GB"
