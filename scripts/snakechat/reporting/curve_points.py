"""Points of curves: of metrics by step, smoothed and averaged."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# Raw values of longer lines are averaged down to this number of points.
MAX_POINTS = 300
# Lines from this number of points on have a moving mean, over this fraction of them.
SMOOTHED_POINTS, SMOOTHED_FRACTION = 30, 1 / 15
# Fewer points are no curve: they are not joined.
CURVE_POINTS = 3

# (step, value), or (step, mean, minimum, maximum).
Point = tuple[float, ...]
Steps = Iterable[Mapping[str, Any]]


class Line(NamedTuple):
    """A line of a curve panel.

    Attributes:
        points: Points in the order of their steps.
        is_series: False for single measurements (held-out rows), which have markers.
    """

    points: Sequence[Point]
    is_series: bool = True


def points_of(steps: Steps, key: str) -> list[tuple[float, float]]:
    """Return (step, value) of a metric, from the lines of metrics.jsonl that have it."""
    return [(line["step"], line[key]) for line in steps if key in line]


def moving_mean(values: Sequence[float]) -> list[float]:
    """Return the centred mean over a fraction of the values; at the ends, over those that exist."""
    half = smoothing_window(len(values)) // 2
    return [
        statistics.fmean(values[max(place - half, 0) : place + half + 1])
        for place in range(len(values))
    ]


def smoothing_window(count: int) -> int:
    """Return the number of steps of the moving mean of a line, an odd number."""
    return 2 * max(round(count * SMOOTHED_FRACTION / 2), 1) + 1


def downsample(points: Sequence[Point]) -> list[Point]:
    """Reduce a line to at most MAX_POINTS points (step, means of neighbouring values)."""
    size = -(-len(points) // MAX_POINTS)
    if size <= 1:
        return list(points)
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    return [
        (group[len(group) // 2][0], *map(statistics.fmean, list(zip(*group, strict=True))[1:]))
        for group in groups
    ]
