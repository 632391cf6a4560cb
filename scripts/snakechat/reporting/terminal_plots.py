"""Curves as text: each character of Unicode's braille patterns has 2 x 4 dots."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

# The bits of the dots of a character, by column and row.
BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
BLANK = 0x2800


class Plot(NamedTuple):
    """A curve as lines of text, and the values of its lowest and highest dots."""

    lines: list[str]
    low: float
    high: float


def plot_curve(points: Sequence[tuple[float, float]], width: int, height: int) -> Plot:
    """Draw a curve from its lowest to its highest value; a constant lies in the middle.

    Args:
        points: (step, value) in the order of the steps, at least one. Points that share a column of
            dots are averaged.
        width, height: In characters.
    """
    first, last = points[0][0], points[-1][0]
    columns: dict[int, list[float]] = {}
    for step, value in points:
        place = (step - first) / ((last - first) or 1)
        columns.setdefault(round(place * (2 * width - 1)), []).append(value)
    means = {column: fmean(values) for column, values in columns.items()}
    low, high = min(means.values()), max(means.values())
    rows = {
        column: round(((high - value) / (high - low) if high > low else 0.5) * (4 * height - 1))
        for column, value in means.items()
    }
    codes = [[BLANK] * width for _ in range(height)]

    def set_dot(column: float, row: float) -> None:
        x, y = round(column), round(row)
        codes[y // 4][x // 2] |= BITS[x % 2][y % 4]

    for column, row in rows.items():
        set_dot(column, row)
    for (left, top), (right, bottom) in pairwise(rows.items()):
        count = max(right - left, abs(bottom - top))
        for number in range(count):
            share = number / count
            set_dot(left + (right - left) * share, top + (bottom - top) * share)
    return Plot(["".join(map(chr, line)) for line in codes], low, high)
