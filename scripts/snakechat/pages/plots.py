"""Curves of trainings as SVG elements of a page. The same data gives the same bytes.

Text is text, in the fonts of the browser.
"""

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")
# Browsers draw Chinese labels in their own fonts.
warnings.filterwarnings("ignore", message="Glyph .* missing from font")

import numpy as np
from markupsafe import Markup
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator, PercentFormatter

from snakechat.pages.metrics import is_fraction, translate
from snakechat.pages.page import TEMPLATES, Panel

# Width of a figure in inches: text has the size of the page's on a phone.
WIDTH = 4.4
# Points of a line: more are averaged.
MAX_POINTS = 60
plt.style.use(TEMPLATES / "plots.mplstyle")

# (step, value); several of a step are of several seeds.
Points = Sequence[tuple[float, float]]


def curve_panels(
    labels: Mapping[str, str], lines: Mapping[str, Callable[[str], Points]]
) -> list[Panel]:
    """Return a figure of each metric that a line has.

    Args:
        labels: By the keys of the metrics.
        lines: By name, functions that return the points of a metric, none without it.
    """
    panels = []
    for key, label in labels.items():
        points = {name: points_at(key) for name, points_at in lines.items()}
        if any(points.values()):
            panels.append(draw_lines(label, points, is_fraction(key)))
    return panels


def points_of(steps: Sequence[Mapping[str, Any]], key: str) -> Points:
    """Return (step, value) of a metric, from the lines of metrics.jsonl that have a number of it.

    Commands of users may write nulls and texts.
    """
    return [(line["step"], line[key]) for line in steps if isinstance(line.get(key), int | float)]


def averaged(points: Points) -> np.ndarray:
    """Return (step, mean, minimum, maximum) of neighbouring steps and all seeds [MAX_POINTS, 4]."""
    values: dict[float, list[float]] = {}
    for step, value in sorted(points):
        values.setdefault(step, []).append(value)
    rows = []
    for steps in np.array_split([*values], min(len(values), MAX_POINTS)):
        found = np.concatenate([values[step] for step in steps])
        rows.append((steps.mean(), found.mean(), found.min(), found.max()))
    return np.array(rows)


def draw_lines(title: str, lines: Mapping[str, Points], percent: bool = False) -> Panel:
    """Plot lines over steps: means, and bands from the lowest to the highest value.

    A line without points has no entry in the legend, and the others keep their colours.

    percent: Whether the values are fractions, which are shown in percent.
    """
    figure, axes = plt.subplots(figsize=(WIDTH, 2.7), layout="constrained")
    for name, points in lines.items():
        steps, means, lows, highs = averaged(points).T if points else np.empty((4, 0))
        marker = "." if len(steps) < MAX_POINTS else ""
        [line] = axes.plot(steps, means, marker=marker, label=name if points else None)
        axes.fill_between(steps, lows, highs, color=line.get_color(), alpha=0.18, lw=0)
    axes.set(xlabel=translate("step"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    if len(lines) > 1:
        axes.legend()
    file = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # The ids of figures with other titles differ.
    with plt.rc_context({"svg.hashsalt": title}):
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    plt.close(figure)
    # Without the declarations before it, which HTML does not have.
    _, tag, svg = file.getvalue().partition("<svg")
    return Panel(title, Markup(tag + svg))
