"""Tables of metrics, with a column for each model or group of trainings."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from snakechat.pages.metrics import ROUNDING, Figure, better_sign, is_fraction, label_of
from snakechat.pages.page import Cell, Table, Tone
from snakechat.pages.texts import DIGITS, MAX_DIGITS, format_number, format_share, translate

# By the names of columns, functions that return the figure at a path, or None if there is none.
Columns = Mapping[str, Callable[[str], Figure | None]]


def metric_table(
    caption: str, columns: Columns, paths: Iterable[str], differences: bool = False
) -> Table:
    """Return a table with a row for each metric that a column has.

    differences: Whether the figures are differences, of which those whose interval excludes 0 are
        marked; otherwise the best value of a row is, if its interval is apart from all others.
    """
    rows: list[list[Any]] = []
    for path in paths:
        figures = [figure_at(path) for figure_at in columns.values()]
        if any(figures):
            best = None if differences else best_figure(path, figures)
            cells = [
                figure and figure_cell(path, figure, differences, figure is best)
                for figure in figures
            ]
            rows.append([label_of(path), *cells])
    note = ""
    if differences:
        note = translate(
            "Brackets contain 95 % intervals; pp: percentage points. ▲ and ▼ mark intervals that"
            " exclude 0, for the better and for the worse."
        )
    if any(cell and cell.tone == "best" for row in rows for cell in row[1:]):
        note = translate("★ marks the best value of a row if its interval overlaps no other one.")
    return Table(caption, ["", *columns], rows, note)


def best_figure(path: str, figures: Sequence[Figure | None]) -> Figure | None:
    """Return the figure that is better than all others by more than their intervals, or None."""
    sign = better_sign(path)
    found = sorted(filter(None, figures), key=lambda figure: sign * figure.value, reverse=True)
    if sign == 0 or len(found) < 2 or not all(figure.interval for figure in found):
        return None
    best, *others = found
    worst_bound = min(sign * bound for bound in best.interval or ())
    next_bound = max(sign * bound for other in others for bound in other.interval or ())
    is_apart = worst_bound > next_bound and not math.isclose(
        best.value, others[0].value, rel_tol=ROUNDING
    )
    return best if is_apart else None


def figure_cell(
    path: str, figure: Figure, is_difference: bool = False, is_best: bool = False
) -> Cell:
    """Return the cell of a metric, or of a difference: better or worse if it excludes 0.

    Both number and interval have the digits in which the bounds of a narrow interval differ.
    """
    digits, notes = DIGITS, []
    if figure.interval:
        digits = digits_of(figure.interval)
        low, high = (format_metric(path, end, is_difference, digits) for end in figure.interval)
        notes.append(f"[{low}, {high}]")
    if figure.n > 1:
        notes.append(f"n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{figure.n}")
    direction = better_sign(path) * figure.direction if is_difference else 0
    tone: Tone = "best" if is_best else ("", "better", "worse")[direction]
    text = format_metric(path, figure.value, is_difference, digits)
    return Cell(text, " ".join(notes), tone)


def format_metric(path: str, value: float, signed: bool = False, digits: int = DIGITS) -> str:
    """Format a metric: fractions in percent, differences (signed) in percentage points.

    digits: Significant digits, except of fractions.
    """
    if is_fraction(path):
        return format_share(value, signed)
    return format_number(value, signed, digits)


def digits_of(interval: Sequence[float]) -> int:
    """Return the significant digits that bounds need to show the first digit of their distance."""
    low, high = interval
    largest, width = max(abs(low), abs(high)), high - low
    if not (math.isfinite(largest) and width > 0):
        return DIGITS
    digits = math.floor(math.log10(largest)) - math.floor(math.log10(width)) + 1
    return min(max(digits, DIGITS), MAX_DIGITS)
