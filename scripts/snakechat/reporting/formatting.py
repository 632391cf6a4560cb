"""Numbers, durations and intervals as text, in the same form on all pages."""

from collections.abc import Sequence
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


def format_with_interval(value: float, interval: Sequence[float] | None) -> str:
    """Format a value and, if it has one, its interval (lower bound, upper bound)."""
    if interval is None:
        return format_number(value)
    low, high = map(format_number, interval)
    return f"{format_number(value)} ({low} … {high})"


def format_estimate(estimate: dict[str, Any] | None) -> str:
    """Format a mean with its 95 % interval, as metrics.json has them; "" for None."""
    if estimate is None:
        return ""
    return format_with_interval(estimate["mean"], estimate["interval_95"])


def format_cell(value: Any) -> str:
    """Format a cell of a table: text as it is, numbers by format_number, None as an empty cell."""
    if value is None:
        return ""
    return value if isinstance(value, str) else format_number(value)
