"""The parts that pages consist of: cards, sections, figures, tables and their cells.

templates/parts.html shows them. Texts are translated already.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from snakechat.reporting.formatting import format_share, format_significant
from snakechat.reporting.labels import better_sign, is_fraction
from snakechat.reporting.plots import Panel

# What a cell is, relative to others: a winner among several, or a difference.
Tone = Literal["", "best", "better", "worse"]


class Cell(NamedTuple):
    """A cell of a table with an interval or a tone.

    Attributes:
        value: The number.
        interval: Its interval, and further facts in small print.
        tone: "best" of the row; "better" or "worse" for a difference that excludes 0.
    """

    value: str
    interval: str = ""
    tone: Tone = ""


class Card(NamedTuple):
    """A result in large print, with a note on its interval and on n."""

    label: str
    value: str
    note: str = ""


class Table(NamedTuple):
    """A table: the first cell of a row is its header. The head may be empty.

    stack: Whether a phone shows each row as a block of lines, for tables of many columns.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    stack: bool = False


class Section(NamedTuple):
    """A section of a page: remarks, then figures with a legend, then tables.

    Attributes:
        legend: Names of the series of the figures.
        kind: What the legend shows: lines, points or bars.
        caption: How to read the figures.
        shown_tables: Tables that are not folded.
        tables: Folded tables.
    """

    title: str
    remarks: Sequence[str] = ()
    panels: Sequence[Panel] = ()
    legend: Sequence[str] = ()
    kind: Literal["lines", "points", "bars"] = "lines"
    caption: str = ""
    shown_tables: Sequence[Table] = ()
    tables: Sequence[Table] = ()


def format_metric(path: str, value: float, signed: bool = False) -> str:
    """Format a metric of metrics.json: fractions in percent, others with three digits."""
    return format_share(value, signed) if is_fraction(path) else format_significant(value, signed)


def format_interval(path: str, interval: Sequence[float] | None, signed: bool = False) -> str:
    """Format the interval of a metric in brackets; "" for None."""
    if interval is None:
        return ""
    low, high = (format_metric(path, bound, signed) for bound in interval)
    return f"[{low}, {high}]"


def metric_cell(
    path: str, value: float | None, interval: Sequence[float] | None = None, tone: Tone = ""
) -> Cell | None:
    """Return the cell of a metric, or None for a metric that does not exist."""
    if value is None:
        return None
    return Cell(format_metric(path, value), format_interval(path, interval), tone)


def difference_cell(
    path: str, value: float, interval: Sequence[float] | None, more: str = ""
) -> Cell:
    """Return the cell of a difference: better or worse if its interval excludes 0.

    more: Further facts for the small print.
    """
    small = " ".join(filter(None, (format_interval(path, interval, signed=True), more)))
    return Cell(format_metric(path, value, signed=True), small, difference_tone(path, interval))


def difference_tone(path: str, interval: Sequence[float] | None) -> Tone:
    """Return whether a difference is one for the better; "" if its interval contains 0."""
    sign = better_sign(path)
    if interval is None or sign == 0 or interval[0] <= 0 <= interval[1]:
        return ""
    return "better" if sign * interval[0] > 0 else "worse"


def mark_best(path: str, cells: Sequence[Cell | None], values: Sequence[float | None]) -> list[Any]:
    """Return the cells of a row with the best value marked, if there is one best value."""
    sign = better_sign(path)
    known = [value for value in values if value is not None]
    if sign == 0 or len(known) < 2:
        return list(cells)
    best = max(known, key=lambda value: sign * value)
    if known.count(best) > 1:
        return list(cells)
    return [
        cell._replace(tone="best") if cell and value == best else cell
        for cell, value in zip(cells, values, strict=True)
    ]
