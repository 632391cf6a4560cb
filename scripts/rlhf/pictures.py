"""Curves as svg, of the same bytes for the same figures."""

import warnings

import matplotlib

matplotlib.use("svg")
# Fixed ids instead of random ones.
matplotlib.rcParams["svg.hashsalt"] = "snakechat"
# Chinese is written by whoever shows a picture, in a font that matplotlib need not have.
warnings.filterwarnings("ignore", message="Glyph .* missing from font")

from matplotlib import pyplot as plt

# Okabe and Ito's colours, apart for all kinds of colour vision.
COLOURS = ["#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#009E73", "#F0E442", "#000000"]
# Lines that lie on each other are seen all the same.
DASHES = ["-", "--", "-.", ":"]
# Lines of fewer points show each.
FEW = 12


def draw_curves(path, panels, across="step", as_text=False):
    """Draw lines over the steps. panels: for each, what it shows and its lines, points by name.

    A line without a name is not in the legend. as_text: whether words stay words, of any script.
    """
    with plt.rc_context({"svg.fonttype": "none" if as_text else "path"}):
        size = (3.6 * len(panels), 3)
        figure, [places] = plt.subplots(
            1, len(panels), figsize=size, layout="constrained", squeeze=False
        )
        for panel, (shown, lines) in zip(places, panels.items(), strict=True):
            for number, (name, points) in enumerate(lines.items()):
                style = {"color": COLOURS[number], "linestyle": DASHES[number % 4]}
                style |= {"marker": "o", "markersize": 3} if len(points) < FEW else {}
                panel.plot(*zip(*points, strict=True), label=name, **style)
            if any(lines):
                panel.legend(fontsize="x-small")
            panel.set(xlabel=across, ylabel=shown)
            panel.grid(alpha=0.3)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def panels_of(steps, curves, held_out="held-out rows"):
    """A panel for each curve (a figure of steps, and what to call it), with that of held-out rows.

    steps: the lines of metrics.jsonl. Held-out rows are evaluated now and then.
    """
    panels = {}
    for key, label in curves.items():
        lines = {"": points_of(steps, key), held_out: points_of(steps, f"eval_{key}")}
        panels[label] = {name: points for name, points in lines.items() if points}
    return panels


def points_of(steps, key):
    """(step, value) of a figure, from the lines of metrics.jsonl that have it."""
    return [(line["step"], line[key]) for line in steps if key in line]
