"""Curves as svg, of the same bytes for the same figures."""

import statistics
import warnings

import matplotlib

matplotlib.use("svg")
# Fixed ids instead of random ones.
matplotlib.rcParams["svg.hashsalt"] = "snakechat"
# Chinese is written by whoever shows a picture, in a font that matplotlib need not have.
warnings.filterwarnings("ignore", message="Glyph .* missing from font")

from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, apart for all kinds of colour vision.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000", "#F0E442"]
# Lines that lie on each other are seen all the same.
DASHES = ["-", "--", "-.", ":"]
# Models and the like are told apart by their shapes too.
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*"]
# Lines of fewer points show each.
FEW = 12
# Points of a line that can be told apart.
MANY = 100
# Panels beside each other: more would be too small to read on a page.
COLUMNS = 2

# What is drawn and told of steps, by stage: figures of metrics.jsonl, and what they are called.
PAIRS = {"loss": "loss (nats per pair)", "accuracy": "accuracy (share)"}
CURVES = {
    "sft": {"loss": "loss (nats per token)", "learning_rate": "learning rate"},
    "reward": PAIRS,
    "dpo": PAIRS,
    "rlhf": {
        "objective/scores": "score",
        "objective/kl": "KL to SFT (nats per response)",
        "objective/entropy": "entropy (nats per token)",
        "response/length": "response length (tokens)",
    },
}


def draw_curves(path, panels, across="step", as_text=False):
    """Draw lines over the steps. panels: for each, what it shows and its lines, points by name.

    A point is (step, value), or (step, value, lowest, highest), whose range is shaded. A line
    without a name is not in the legend. as_text: whether words stay words, of any script.
    """
    with plt.rc_context({"svg.fonttype": "none" if as_text else "path"}):
        figure, places = panels_for(len(panels))
        for panel, (shown, lines) in zip(places, panels.items(), strict=True):
            for number, (name, points) in enumerate(lines.items()):
                colour = COLOURS[number % len(COLOURS)]
                style = {"color": colour, "linestyle": DASHES[number % 4]}
                style |= {"marker": "o", "markersize": 3} if len(points) < FEW else {}
                steps, values, *bounds = zip(*points, strict=True)
                panel.plot(steps, values, label=name, **style)
                if bounds:
                    panel.fill_between(steps, *bounds, color=colour, alpha=0.2)
            if any(lines):
                panel.legend(fontsize="small")
            panel.set(xlabel=across, ylabel=shown)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            panel.ticklabel_format(axis="y", useOffset=False)
            panel.grid(alpha=0.3)
        save(figure, path)


def panels_for(number):
    """A figure with so many empty panels, at most COLUMNS in a row, and these panels."""
    columns = min(number, COLUMNS)
    rows = -(-number // columns)
    figure = plt.figure(figsize=(4.6 * columns, 3.2 * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(number)]


def save(figure, path):
    """Write a figure, without the time at which it was drawn."""
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_trade_off(path, panels, across, up):
    """Draw a figure of models against another, both with their intervals.

    panels: for each, its title and its models: (value, its interval) across and up, by name. An
    interval is (lowest, highest), or None.
    """
    figure, places = panels_for(len(panels))
    for panel, (shown, models) in zip(places, panels.items(), strict=True):
        panel.axhline(0.5, color="grey", linewidth=0.8, linestyle=":")
        for number, (name, (x, of_x, y, of_y)) in enumerate(models.items()):
            style = {"color": COLOURS[number % 8], "marker": MARKERS[number % 8], "capsize": 3}
            errors = {"xerr": reach(x, of_x), "yerr": reach(y, of_y)}
            panel.errorbar(x, y, **errors, **style, markersize=4, linestyle="none", label=name)
        panel.set(title=shown, xlabel=across, ylabel=up, ylim=(-0.03, 1.03))
        panel.legend(fontsize="small")
        panel.grid(alpha=0.3)
    save(figure, path)


def draw_calibration(path, bins, pairs="pairs"):
    """Draw how often a reward model is right where it is so sure, and how often it is so sure.

    bins: (confidence, accuracy, its interval, number of pairs) of each.
    """
    figure, (panel, below) = panels_for(2)
    panel.plot([0.5, 1], [0.5, 1], color="grey", linewidth=0.8, linestyle=":", label="calibrated")
    for confidence, accuracy, interval, _ in bins:
        errors = {"yerr": reach(accuracy, interval), "capsize": 3}
        panel.errorbar(confidence, accuracy, **errors, color=COLOURS[0], marker="o")
    confidences, numbers = [each[0] for each in bins], [each[3] for each in bins]
    below.bar(confidences, numbers, width=0.02, color=COLOURS[0])
    across = "confidence: sigmoid(|difference of scores|)"
    panel.set(xlabel=across, ylabel="accuracy (share)", xlim=(0.48, 1.02), ylim=(-0.03, 1.03))
    below.set(xlabel=across, ylabel=pairs, xlim=(0.48, 1.02), yscale="log")
    panel.legend(fontsize="small", loc="lower right")
    for each in (panel, below):
        each.grid(alpha=0.3)
    save(figure, path)


def draw_bars(path, panels):
    """Draw horizontal bars, those of all panels in the same order.

    panels: for each, what it shows and its values by name; None where a value is not known.
    """
    names = list(next(iter(panels.values())))
    figure, places = plt.subplots(
        1, len(panels), figsize=(9.2, 1 + 0.28 * len(names)), layout="constrained", sharey=True
    )
    for number, (panel, (shown, values)) in enumerate(zip(places, panels.items(), strict=True)):
        known = [values[name] or 0 for name in names]
        panel.barh(names, known, color=COLOURS[number])
        panel.set(xlabel=shown)
        panel.grid(alpha=0.3, axis="x")
    places[0].invert_yaxis()
    save(figure, path)


def reach(value, interval):
    """How far an interval goes below and above its value, as error bars are told; None of None."""
    if interval is None:
        return None
    low, high = interval
    return [[max(value - low, 0)], [max(high - value, 0)]]


def panels_of(steps, curves, held_out="held-out rows"):
    """A panel for each curve (a figure of steps, and what to call it), with that of held-out rows.

    steps: the lines of metrics.jsonl. Held-out rows are evaluated now and then.
    """
    panels = {}
    for key, label in curves.items():
        lines = {"": points_of(steps, key), held_out: points_of(steps, f"eval_{key}")}
        panels[label] = {name: thinned(points) for name, points in lines.items() if points}
    return panels


def thinned(points):
    """The points of a line, or (step, mean, lowest, highest) of neighbours where they are many."""
    size = -(-len(points) // MANY)
    if size == 1:
        return points
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    values = [[value for _, value in group] for group in groups]
    return [
        (group[len(group) // 2][0], statistics.fmean(found), min(found), max(found))
        for group, found in zip(groups, values, strict=True)
    ]


def points_of(steps, key):
    """(step, value) of a figure, from the lines of metrics.jsonl that have it."""
    return [(line["step"], line[key]) for line in steps if key in line]
