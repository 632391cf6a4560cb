"""Panels of plots as SVG elements of a page. The same data gives the same bytes.

Text is text, in the fonts of the browser. Legends are lists of the page (templates/parts.html),
which several panels share.
"""

import io
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("svg")
# Browsers draw Chinese labels in their own fonts.
warnings.filterwarnings("ignore", message="Glyph .* missing from font")

from markupsafe import Markup
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, MaxNLocator

from snakechat.reporting.curve_points import (
    CURVE_POINTS,
    MAX_POINTS,
    SMOOTHED_POINTS,
    Line,
    downsample,
    moving_mean,
)

# After Okabe and Ito's palette, which readers with any kind of colour vision can distinguish, with
# enough contrast on white. Legends have the same colours (templates/style.css).
COLOURS = ["#0072b2", "#c44e00", "#007f5c", "#a84e86", "#8f6400", "#3c87b8", "#1f2328", "#7a6f00"]
INK, MUTED, GRID = "#1f2328", "#59636e", "#d1d9e0"
# Distinguish lines and points that overlap, or that are printed without colours.
LINE_STYLES = ["-", (0, (5, 2)), (0, (6, 2, 1, 2)), (0, (1, 1.5))]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
# Distances of ticks, times a power of ten.
TICK_STEPS = [1, 2, 5, 10]
# Width of a panel in inches: text has the size of the page's on a phone.
WIDTH = 4.4

# Typed as rc_context types its argument, by the names of all settings.
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "svg.fonttype": "none",
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
}

# A value, and its interval if it has one.
Estimated = tuple[float, Sequence[float] | None]


class Panel(NamedTuple):
    """A figure of a page.

    Attributes:
        title: What it shows, with the unit.
        svg: The plot.
        caption: How to read it; may be empty.
    """

    title: str
    svg: Markup
    caption: str = ""


class Ticks(Formatter):
    """Labels of ticks: with as many decimals as one of them needs, and thousands separators.

    percent: Whether the values are fractions, which are shown in percent, as in the text.
    """

    def __init__(self, percent: bool = False) -> None:
        self.factor, self.unit = (100, "\N{NO-BREAK SPACE}%") if percent else (1, "")

    def __call__(self, value: float, position: int | None = None) -> str:
        """Return the label of a single tick."""
        return self.format_ticks([value])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """Return the labels of all ticks of an axis."""
        numbers = [float(f"{value * self.factor:.9g}") for value in values]
        decimals = max((len(f"{number:.9g}".partition(".")[2]) for number in numbers), default=0)
        tiny = any("e-" in f"{number:.9g}" for number in numbers)
        texts = [f"{n:g}" if tiny else f"{n:,.{decimals}f}" for n in numbers]
        return [text.replace("-", "\N{MINUS SIGN}") + self.unit for text in texts]


def draw_lines(title: str, lines: Mapping[str, Line], xlabel: str, percent: bool = False) -> Markup:
    """Plot lines over steps: raw values, thin, and their moving mean; or a mean and a range.

    percent: Whether the values are fractions, which are shown in percent.
    """
    with plt.rc_context(STYLE):
        figure, panel = new_figure()
        for number, line in enumerate(lines.values()):
            if line.points:
                _draw_line(panel, line, number)
        panel.set(xlabel=xlabel)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=[1, 2, 5, 10]))
        panel.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=TICK_STEPS))
        panel.yaxis.set_major_formatter(Ticks(percent))
        panel.grid(axis="y")
        return as_svg(figure, title)


def _draw_line(panel: Axes, line: Line, number: int) -> None:
    """Draw a line, with the colour and style of its number."""
    colour = COLOURS[number % len(COLOURS)]
    steps, values, *bounds = map(list, zip(*line.points, strict=True))
    style: dict[str, Any] = {"color": colour, "linestyle": LINE_STYLES[number % len(LINE_STYLES)]}
    if not line.is_series or len(steps) < CURVE_POINTS:
        style |= {"marker": MARKERS[number % len(MARKERS)], "markersize": 5}
    if len(steps) < CURVE_POINTS:
        style["linestyle"] = "none"
    if line.is_series and len(steps) >= SMOOTHED_POINTS:
        if not bounds:
            raw = downsample(line.points)
            thin: dict[str, Any] = {"color": colour, "alpha": 0.35, "linewidth": 0.8}
            panel.plot(*zip(*raw, strict=True), **thin)
        values, *bounds = [moving_mean(each) for each in (values, *bounds)]
    if bounds:
        low, high = bounds
        panel.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
    if len(steps) > MAX_POINTS:
        reduced = downsample(list(zip(steps, values, strict=True)))
        steps, values = map(list, zip(*reduced, strict=True))
    panel.plot(steps, values, **style)


def draw_estimates(
    title: str,
    estimates: Mapping[str, Estimated | None],
    reference: float | None = None,
    percent: bool = False,
) -> Markup:
    """Plot a metric of models, or of groups, as points with their intervals, one below the other.

    Args:
        estimates: By name; the row of one without the metric is empty.
        reference: Where a vertical line stands: a tie, or no difference.
        percent: Whether the values are fractions, which are shown in percent.
    """
    with plt.rc_context(STYLE):
        figure, panel = new_figure(height=0.75 + 0.3 * len(estimates))
        if reference is not None:
            panel.axvline(reference, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
        for row, estimate in enumerate(estimates.values()):
            if estimate is None:
                continue
            value, interval = estimate
            style: dict[str, Any] = {"color": COLOURS[row % 8], "marker": MARKERS[row % 8]}
            bars = error_bars(value, interval)
            panel.errorbar(value, row, xerr=bars, **style, capsize=3, linestyle="none")
        panel.set_yticks(range(len(estimates)), list(estimates))
        panel.tick_params(axis="y", labelcolor=INK)
        panel.set(ylim=(len(estimates) - 0.4, -0.6))
        panel.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=TICK_STEPS))
        panel.xaxis.set_major_formatter(Ticks(percent))
        panel.margins(x=0.1)
        if percent and reference is None:
            low, high = panel.get_xlim()
            panel.set_xlim(max(low, -0.02), min(high, 1.02))
            low, high = panel.get_xlim()
            # No share is below 0 or above 1, where the margins of the axis are.
            ticks = [tick for tick in panel.get_xticks() if -1e-9 < tick < 1 + 1e-9]
            panel.set_xticks([tick for tick in ticks if low <= tick <= high])
        panel.grid(axis="x")
        return as_svg(figure, title)


def draw_trade_off(
    title: str, models: Mapping[str, tuple[Estimated, Estimated] | None], xlabel: str, ylabel: str
) -> Markup:
    """Plot a fraction of models against another metric, both with their intervals.

    models: (x, y) by model, or None; the line at one half is a tie.
    """
    with plt.rc_context(STYLE):
        figure, panel = new_figure()
        panel.axhline(0.5, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
        for number, point in enumerate(models.values()):
            if point is None:
                continue
            (x, x_interval), (y, y_interval) = point
            style: dict[str, Any] = {"color": COLOURS[number % 8], "marker": MARKERS[number % 8]}
            style |= {"xerr": error_bars(x, x_interval), "yerr": error_bars(y, y_interval)}
            panel.errorbar(x, y, **style, capsize=3, markersize=5, linestyle="none")
        panel.set(xlabel=xlabel, ylabel=ylabel, ylim=(-0.03, 1.03))
        panel.yaxis.set_major_formatter(Ticks(percent=True))
        panel.margins(x=0.1)
        panel.grid()
        return as_svg(figure, title)


def draw_calibration(
    title: str, bins: Sequence[tuple[float, Estimated]], xlabel: str, ylabel: str
) -> Markup:
    """Plot the accuracy of a reward model by its confidence. bins: (confidence, accuracy)."""
    with plt.rc_context(STYLE):
        figure, panel = new_figure()
        panel.plot([0.5, 1], [0.5, 1], color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)))
        for confidence, (accuracy, interval) in bins:
            bars = error_bars(accuracy, interval)
            style: dict[str, Any] = {"color": COLOURS[0], "marker": "o", "markersize": 5}
            panel.errorbar(confidence, accuracy, yerr=bars, **style, capsize=3)
        panel.set(xlabel=xlabel, ylabel=ylabel, xlim=(0.48, 1.02), ylim=(-0.03, 1.03))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter(Ticks(percent=True))
        panel.grid()
        return as_svg(figure, title)


def draw_columns(title: str, columns: Sequence[tuple[float, int]], xlabel: str) -> Markup:
    """Plot counts by a fraction as columns, on a logarithmic scale."""
    with plt.rc_context(STYLE):
        figure, panel = new_figure()
        places, heights = zip(*columns, strict=True)
        panel.bar(places, heights, width=0.02, color=COLOURS[0])
        panel.set(xlabel=xlabel, xlim=(0.48, 1.02), yscale="log")
        # From less than 1, so that a single one is visible.
        panel.set_ylim(bottom=0.5)
        panel.xaxis.set_major_formatter(Ticks(percent=True))
        panel.yaxis.set_major_formatter(Ticks())
        panel.grid(axis="y")
        return as_svg(figure, title)


def draw_bars(
    title: str,
    bars: Mapping[str, Mapping[str, float | None]],
    xlabel: str = "",
    stacked: bool = False,
    percent: bool = False,
) -> Markup:
    """Plot horizontal bars.

    Args:
        bars: For each name, the lengths of its bars by series; None for an unknown value.
        stacked: Whether the bars of a name follow one another instead of lying side by side.
        percent: Whether the values are fractions, whose axis reaches from 0 to 100 %.
    """
    series = list(dict.fromkeys(key for values in bars.values() for key in values))
    width = 0.7 if stacked else 0.75 / max(len(series), 1)
    rows = len(bars) * (1 if stacked else max(len(series) * 0.6, 1))
    with plt.rc_context(STYLE):
        figure, panel = new_figure(height=0.7 + 0.26 * rows)
        for row, values in enumerate(bars.values()):
            left = 0.0
            for number, key in enumerate(series):
                length = values.get(key) or 0
                place = row if stacked else row + (number - (len(series) - 1) / 2) * width
                panel.barh(place, length, width * 0.9, left=left, color=COLOURS[number % 8])
                left += length if stacked else 0
        panel.set_yticks(range(len(bars)), list(bars))
        panel.tick_params(axis="y", labelcolor=INK)
        panel.set(xlabel=xlabel, ylim=(len(bars) - 0.5, -0.5))
        if percent:
            panel.set(xlim=(0, 1))
            panel.xaxis.set_major_formatter(Ticks(percent=True))
        else:
            panel.xaxis.set_major_locator(MaxNLocator(nbins=5))
        panel.grid(axis="x")
        return as_svg(figure, title)


def draw_quantiles(title: str, quantiles: Mapping[str, Mapping[str, float]]) -> Markup:
    """Plot distributions: the median, a bar from p10 to p90, a line from p1 to p99, by name."""
    with plt.rc_context(STYLE):
        figure, panel = new_figure(height=0.7 + 0.26 * len(quantiles))
        for row, of in enumerate(quantiles.values()):
            panel.plot([of["p1"], of["p99"]], [row, row], color=COLOURS[0], linewidth=1)
            panel.barh(row, of["p90"] - of["p10"], 0.5, left=of["p10"], color=COLOURS[0])
            panel.plot([of["p50"]], [row], color=COLOURS[1], marker="|", markersize=10, mew=2)
        panel.set_yticks(range(len(quantiles)), list(quantiles))
        panel.tick_params(axis="y", labelcolor=INK)
        panel.set(ylim=(len(quantiles) - 0.4, -0.6))
        panel.set_xlim(left=0)
        panel.grid(axis="x")
        return as_svg(figure, title)


def draw_dumbbells(title: str, pairs: Mapping[str, tuple[float, float]], xlabel: str) -> Markup:
    """Plot two values of each name, joined, one name below the other."""
    with plt.rc_context(STYLE):
        figure, panel = new_figure(height=0.8 + 0.2 * len(pairs))
        for row, values in enumerate(pairs.values()):
            panel.plot(values, (row, row), color=GRID, linewidth=2, zorder=1)
            for number, value in enumerate(values):
                style: dict[str, Any] = {"color": COLOURS[number], "marker": MARKERS[number]}
                panel.plot(value, row, **style, markersize=6, linestyle="none")
        panel.set_yticks(range(len(pairs)), list(pairs))
        panel.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=TICK_STEPS))
        panel.xaxis.set_major_formatter(Ticks())
        panel.set(xlabel=xlabel, ylim=(len(pairs) - 0.4, -0.6))
        panel.grid(axis="x")
        return as_svg(figure, title)


def new_figure(height: float = 2.7) -> tuple[Figure, Axes]:
    """Create a figure with one panel; its height in inches."""
    return plt.subplots(figsize=(WIDTH, height), layout="constrained")


def as_svg(figure: Figure, title: str) -> Markup:
    """Return a figure as an <svg> element.

    The ids that it refers to are those of no other title, because a page has several figures.
    """
    file = io.StringIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with plt.rc_context({"svg.hashsalt": title}):
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    plt.close(figure)
    # Without the declarations before it, which HTML does not have.
    _, tag, svg = file.getvalue().partition("<svg")
    return Markup(tag + svg)


def error_bars(value: float, interval: Sequence[float] | None) -> list[list[float]] | None:
    """Return the distances from a value to its interval, as matplotlib expects error bars."""
    if interval is None:
        return None
    low, high = interval
    return [[max(value - low, 0)], [max(high - value, 0)]]
