"""Curves: the metrics of trainings by step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from snakechat.reporting.labels import CURVES, STAGES, is_fraction
from snakechat.reporting.page_parts import Section
from snakechat.reporting.plots import Panel, Point, draw_lines
from snakechat.reporting.translations import translate

# Returns the points of a metric by its key; none if the line does not have the metric.
Line = Callable[[str], Sequence[Point]]


def points_of(steps: Sequence[Mapping[str, Any]], key: str) -> list[Point]:
    """Return (step, value) of a metric, from the lines of metrics.jsonl that have it."""
    return [(line["step"], line[key]) for line in steps if key in line]


def curve_panels(stage: str, lines: Mapping[str, Line]) -> list[Panel]:
    """Return a figure of each metric of a stage that a line has.

    lines: The lines of each figure, by name.
    """
    panels = []
    for key, label in CURVES[stage].items():
        points = {name: line(key) for name, line in lines.items()}
        shown = {name: of_line for name, of_line in points.items() if of_line}
        if shown:
            panels.append(draw_lines(translate(label), shown, translate("step"), is_fraction(key)))
    return panels


def training_section(stage: str, steps: Sequence[Mapping[str, Any]]) -> Section:
    """Return the section of the curves of a training.

    steps: The lines of metrics.jsonl.
    """
    lines = {
        translate("training"): lambda key: points_of(steps, key),
        translate("held-out rows"): lambda key: points_of(steps, f"eval_{key}"),
    }
    return Section(
        translate("Training: {model}", model=translate(STAGES[stage])),
        panels=curve_panels(stage, lines),
        caption=translate(
            "Thin lines show the values of the steps, thick lines their moving mean."
        ),
    )
