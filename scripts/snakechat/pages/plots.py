"""Figures and curves as SVG elements of a page. The same data gives the same bytes.

Text is text, in the fonts of the browser.
"""

import io
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")
# Browsers draw Chinese labels in their own fonts.
warnings.filterwarnings("ignore", message="Glyph .* missing from font")

import numpy as np
from markupsafe import Markup
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from snakechat.pages.metrics import CURVES, is_fraction, label_of
from snakechat.pages.metrics import Figure as Estimate
from snakechat.pages.page import TEMPLATES, Panel
from snakechat.pages.tables import Columns
from snakechat.pages.texts import NAMES, translate

# The first colour of the style.
COLOUR = "#0072b2"
INK = "#1f2328"
# Width of a figure in inches: text has the size of the page's on a phone.
WIDTH = 4.4
# Points of a line, and of the thin line behind it: longer lines are averaged.
MAX_POINTS, MAX_THIN_POINTS = 30, 300
plt.style.use(TEMPLATES / "plots.mplstyle")

# (step, value), or (step, mean, minimum, maximum).
Point = tuple[float, ...]
# Returns the points of a metric by its key; none if the line does not have the metric.
Line = Callable[[str], Sequence[Point]]


def curve_panels(stage: str, lines: Mapping[str, Line], own: Iterable[str]) -> list[Panel]:
    """Return a figure of each metric of a stage that a line has.

    Args:
        lines: The lines of each figure, by name.
        own: Metrics of a user's command (snakechat.pages.metrics.own_metrics).
    """
    labels = {key: translate(names["en"]) for key, names in NAMES[CURVES[stage]].items()}
    return _panels(draw_lines, labels | {key: key for key in own}, lines)


def metric_panels(columns: Columns, paths: Iterable[str]) -> list[Panel]:
    """Return a figure of each metric that a column has."""
    return _panels(draw_estimates, {path: label_of(path) for path in paths}, columns)


def _panels(
    draw: Callable[[str, Mapping[str, Any], bool], Panel],
    labels: Mapping[str, str],
    columns: Mapping[str, Callable[[str], Any]],
) -> list[Panel]:
    """Return a figure of each metric that a column has. labels: By the keys of the metrics."""
    panels = []
    for key, label in labels.items():
        values = {name: value_of(key) for name, value_of in columns.items()}
        if any(values.values()):
            panels.append(draw(label, values, is_fraction(key)))
    return panels


def points_of(steps: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    """Return (step, value) of a metric, from the lines of metrics.jsonl that have it."""
    return [(line["step"], line[key]) for line in steps if key in line]


def draw_lines(title: str, lines: Mapping[str, Sequence[Point]], percent: bool = False) -> Panel:
    """Plot lines over steps: values, thin, and means of neighbouring ones; or a mean and a range.

    A line without points has no entry in the legend, and the others keep their colours.

    percent: Whether the values are fractions, which are shown in percent.
    """
    figure, axes = plt.subplots(figsize=(WIDTH, 2.7), layout="constrained")
    for name, points in lines.items():
        if points:
            _draw_line(axes, name, np.array(points, dtype=float))
        else:
            axes.plot([], [])
    axes.set(xlabel=translate("step"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    if len(lines) > 1:
        axes.legend()
    return _panel(figure, title)


def _draw_line(axes: Axes, name: str, points: np.ndarray) -> None:
    """Draw a line: points [n, 2], or [n, 4] with a range."""
    shown, is_mean = averaged(points, MAX_POINTS), len(points) > MAX_POINTS
    [line] = axes.plot(shown[:, 0], shown[:, 1], label=name, marker="" if is_mean else ".")
    colour = line.get_color()
    if points.shape[1] == 4:
        axes.fill_between(shown[:, 0], shown[:, 2], shown[:, 3], color=colour, alpha=0.18, lw=0)
    elif is_mean:
        thin = averaged(points, MAX_THIN_POINTS)
        axes.plot(*thin.T, color=colour, linestyle="-", linewidth=0.8, alpha=0.35)


def averaged(points: np.ndarray, number: int) -> np.ndarray:
    """Return at most a number of points [m, k]: means of neighbouring points [n, k]."""
    parts = np.array_split(points, min(len(points), number))
    return np.array([part.mean(axis=0) for part in parts])


def draw_estimates(
    title: str, estimates: Mapping[str, Estimate | None], percent: bool = False
) -> Panel:
    """Plot a metric of models or of groups, with its intervals, one below the other.

    The row of one without the metric is empty. percent: As in draw_lines.
    """
    size = WIDTH, 0.75 + 0.3 * len(estimates)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    for row, estimate in enumerate(estimates.values()):
        if estimate is not None:
            low, high = estimate.interval or (estimate.value, estimate.value)
            # A mean can lie outside of its percentile interval.
            bars = [[max(estimate.value - low, 0)], [max(high - estimate.value, 0)]]
            axes.errorbar(estimate.value, row, xerr=bars, fmt="o", color=COLOUR, capsize=3)
    axes.set_yticks(range(len(estimates)), list(estimates))
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set(ylim=(len(estimates) - 0.4, -0.6))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
    if percent:
        axes.xaxis.set_major_formatter(PercentFormatter(1))
    return _panel(figure, title)


def _panel(figure: Figure, title: str) -> Panel:
    """Return a figure as a panel, whose ids differ from the ids of figures with other titles."""
    file = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with plt.rc_context({"svg.hashsalt": title}):
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    plt.close(figure)
    # Without the declarations before it, which HTML does not have.
    _, tag, svg = file.getvalue().partition("<svg")
    return Panel(title, Markup(tag + svg))
