"""Sections of curves: the metrics of a training by step."""

from collections.abc import Mapping, Sequence
from typing import Any

from snakechat.reporting.labels import is_fraction
from snakechat.reporting.page_parts import Section
from snakechat.reporting.plots import draw_lines
from snakechat.reporting.translations import translate


def points_of(steps: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, ...]]:
    """Return (step, value) of a metric, from the lines of metrics.jsonl that have it."""
    return [(line["step"], line[key]) for line in steps if key in line]


def curve_section(
    title: str,
    steps: Sequence[Mapping[str, Any]],
    curves: Mapping[str, str],
) -> Section:
    """Return a section with a figure of each metric that the steps have.

    Args:
        steps: The lines of metrics.jsonl.
        curves: Labels of the metrics, by key.
    """
    panels = []
    for key, label in curves.items():
        lines = {
            translate("training"): points_of(steps, key),
            translate("held-out rows"): points_of(steps, f"eval_{key}"),
        }
        lines = {name: points for name, points in lines.items() if points}
        if lines:
            panels.append(draw_lines(translate(label), lines, translate("step"), is_fraction(key)))
    caption = translate("Thin lines show the values of the steps, thick lines their moving mean.")
    return Section(title, panels, caption)
