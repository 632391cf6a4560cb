"""Plots as SVG files. The same data gives the same bytes."""

import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
# Element ids are random without a salt.
matplotlib.rcParams["svg.hashsalt"] = "snakechat"
# Viewers draw Chinese labels in their own fonts.
warnings.filterwarnings("ignore", message="Glyph .* missing from font")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's palette, which readers with any kind of colour vision can distinguish.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000", "#F0E442"]
# Distinguish lines that overlap.
LINE_STYLES = ["-", "--", "-.", ":"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
# Lines with fewer points have markers.
MARKED_POINTS = 12
# Lines with more points are averaged down to this number.
MAX_POINTS = 100
# Panels in a row: three are too small to read on a page.
COLUMNS = 2

# (step, value), or (step, mean, minimum, maximum).
Point = tuple[float, ...]
Steps = Iterable[Mapping[str, Any]]
# A value, its interval, another value and its interval.
TradeOff = tuple[float, Sequence[float] | None, float, Sequence[float] | None]


def draw_curves(
    path: Path,
    panels: Mapping[str, Mapping[str, Sequence[Point]]],
    xlabel: str = "step",
    text_as_text: bool = False,
) -> None:
    """Plot lines over steps.

    Args:
        path: SVG file to write.
        panels: For each panel, by its y label, points by name of the line. Points with minimum and
            maximum have a shaded range. Lines without a name are not in the legend.
        xlabel: Label of the x axes.
        text_as_text: Keep text as text, in any script, instead of glyphs as paths.
    """
    with plt.rc_context({"svg.fonttype": "none" if text_as_text else "path"}):
        figure, axes = figure_with_panels(len(panels))
        for panel, (ylabel, lines) in zip(axes, panels.items(), strict=True):
            for number, (name, points) in enumerate(lines.items()):
                colour = COLOURS[number % len(COLOURS)]
                style: dict[str, Any] = {"color": colour, "linestyle": LINE_STYLES[number % 4]}
                if len(points) < MARKED_POINTS:
                    style |= {"marker": "o", "markersize": 3}
                steps, values, *bounds = zip(*points, strict=True)
                panel.plot(steps, values, label=name, **style)
                if bounds:
                    low, high = bounds
                    panel.fill_between(steps, low, high, color=colour, alpha=0.2)
            if any(lines):
                panel.legend(fontsize="small")
            panel.set(xlabel=xlabel, ylabel=ylabel)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            panel.ticklabel_format(axis="y", useOffset=False)
            panel.grid(alpha=0.3)
        save_figure(figure, path)


def figure_with_panels(count: int) -> tuple[Figure, list[Axes]]:
    """Create a figure with a number of empty panels, at most COLUMNS in a row."""
    columns = min(count, COLUMNS)
    rows = -(-count // columns)
    figure = plt.figure(figsize=(4.6 * columns, 3.2 * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(count)]


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure without the time at which it was drawn."""
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_trade_off(
    path: Path, panels: Mapping[str, Mapping[str, TradeOff]], xlabel: str, ylabel: str
) -> None:
    """Plot one metric of models against another, both with their intervals.

    Args:
        path: SVG file to write.
        panels: For each panel, by its title, (x, interval of x, y, interval of y) by model.
        xlabel: Label of the x axes.
        ylabel: Label of the y axes, which show fractions.
    """
    figure, axes = figure_with_panels(len(panels))
    for panel, (title, models) in zip(axes, panels.items(), strict=True):
        panel.axhline(0.5, color="grey", linewidth=0.8, linestyle=":")
        for number, (name, (x, x_interval, y, y_interval)) in enumerate(models.items()):
            style: dict[str, Any] = {"color": COLOURS[number % 8], "marker": MARKERS[number % 8]}
            style |= {"xerr": error_bars(x, x_interval), "yerr": error_bars(y, y_interval)}
            panel.errorbar(x, y, **style, capsize=3, markersize=4, linestyle="none", label=name)
        panel.set(title=title, xlabel=xlabel, ylabel=ylabel, ylim=(-0.03, 1.03))
        panel.legend(fontsize="small")
        panel.grid(alpha=0.3)
    save_figure(figure, path)


def draw_calibration(
    path: Path, bins: Sequence[tuple[float, float, Sequence[float], int]], pairs: str = "pairs"
) -> None:
    """Plot accuracy and number of pairs against the confidence of a reward model.

    bins: (confidence, accuracy, its interval, number of pairs) of each bin.
    """
    figure, (accuracies, counts) = figure_with_panels(2)
    accuracies.plot(
        [0.5, 1], [0.5, 1], color="grey", linewidth=0.8, linestyle=":", label="calibrated"
    )
    for confidence, accuracy, interval, _ in bins:
        accuracies.errorbar(
            confidence,
            accuracy,
            yerr=error_bars(accuracy, interval),
            capsize=3,
            color=COLOURS[0],
            marker="o",
        )
    counts.bar([each[0] for each in bins], [each[3] for each in bins], width=0.02, color=COLOURS[0])
    xlabel = "confidence: sigmoid(|difference of scores|)"
    accuracies.set(xlabel=xlabel, ylabel="accuracy", xlim=(0.48, 1.02), ylim=(-0.03, 1.03))
    counts.set(xlabel=xlabel, ylabel=pairs, xlim=(0.48, 1.02), yscale="log")
    accuracies.legend(fontsize="small", loc="lower right")
    for panel in (accuracies, counts):
        panel.grid(alpha=0.3)
    save_figure(figure, path)


def draw_bars(path: Path, panels: Mapping[str, Mapping[str, float | None]]) -> None:
    """Plot horizontal bars, with the names of the first panel in all panels.

    panels: For each panel, by its label, values by name; None for an unknown value.
    """
    names = list(next(iter(panels.values())))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(9.2, 1 + 0.28 * len(names)), layout="constrained", sharey=True
    )
    for number, (panel, (label, values)) in enumerate(zip(axes, panels.items(), strict=True)):
        panel.barh(names, [values[name] or 0 for name in names], color=COLOURS[number])
        panel.set(xlabel=label)
        panel.grid(alpha=0.3, axis="x")
    axes[0].invert_yaxis()
    save_figure(figure, path)


def error_bars(value: float, interval: Sequence[float] | None) -> list[list[float]] | None:
    """Return the distances from a value to its interval, as matplotlib expects error bars."""
    if interval is None:
        return None
    low, high = interval
    return [[max(value - low, 0)], [max(high - value, 0)]]


def curve_panels(
    steps: Sequence[Mapping[str, Any]],
    curves: Mapping[str, str],
    held_out: str = "held-out rows",
) -> dict[str, dict[str, list[Point]]]:
    """Return panels of draw_curves: a line of each training metric, and one of held-out rows.

    Args:
        steps: The lines of metrics.jsonl.
        curves: Labels of the metrics to plot, by key.
        held_out: Name of the line of held-out rows (eval_KEY), which only some steps have.
    """
    panels = {}
    for key, label in curves.items():
        lines = {"": points_of(steps, key), held_out: points_of(steps, f"eval_{key}")}
        panels[label] = {name: downsample(points) for name, points in lines.items() if points}
    return panels


def downsample(points: Sequence[Point]) -> list[Point]:
    """Reduce a line to MAX_POINTS points: (step, mean, minimum, maximum) of neighbouring ones."""
    size = -(-len(points) // MAX_POINTS)
    if size == 1:
        return list(points)
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    reduced: list[Point] = []
    for group in groups:
        values = [value for _, value in group]
        middle = group[len(group) // 2][0]
        reduced.append((middle, statistics.fmean(values), min(values), max(values)))
    return reduced


def points_of(steps: Steps, key: str) -> list[tuple[float, float]]:
    """Return (step, value) of a metric, from the lines of metrics.jsonl that have it."""
    return [(line["step"], line[key]) for line in steps if key in line]
