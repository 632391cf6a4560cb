"""Sections of curves: the metrics of a training by step."""

from collections.abc import Mapping, Sequence
from typing import Any

from snakechat.reporting.curve_points import (
    CURVE_POINTS,
    MAX_POINTS,
    SMOOTHED_POINTS,
    Line,
    points_of,
    smoothing_window,
)
from snakechat.reporting.labels import is_share
from snakechat.reporting.page_parts import Section
from snakechat.reporting.plots import Panel, draw_lines
from snakechat.reporting.translations import Translate

Steps = Sequence[Mapping[str, Any]]


def curve_section(
    title: str, steps: Steps, curves: Mapping[str, str], translate: Translate
) -> Section:
    """Return a section with a panel of each metric that the steps have.

    Args:
        steps: The lines of metrics.jsonl.
        curves: Labels of the metrics, by key.
    """
    panels, with_held_out, longest = [], False, 0
    for key, label in curves.items():
        training, held_out = points_of(steps, key), points_of(steps, f"eval_{key}")
        if not training:
            continue
        lines = {translate("training"): Line(training)}
        if held_out:
            lines[translate("held-out rows")] = Line(held_out, is_series=False)
        with_held_out |= bool(held_out)
        longest = max(longest, len(training))
        text = translate(label)
        svg = draw_lines(f"{title}: {text}", lines, translate("step"), percent=is_share(key))
        panels.append(Panel(text, svg))
    legend = [translate("training"), translate("held-out rows")] if with_held_out else []
    caption = " ".join(curve_notes(longest, translate))
    return Section(title, panels=panels, legend=legend, caption=caption)


def curve_notes(count: int, translate: Translate) -> list[str]:
    """Return sentences on how to read the curves of a number of steps."""
    notes = []
    if count >= SMOOTHED_POINTS:
        notes.append(
            translate(
                "Thin lines are the values of the steps, thick lines their mean over {window}"
                " neighbouring steps.",
                window=smoothing_window(count),
            )
        )
    if count > MAX_POINTS:
        notes.append(
            translate(
                "The thin lines show means of {size} steps each.", size=-(-count // MAX_POINTS)
            )
        )
    if 0 < count < CURVE_POINTS:
        notes.append(translate("So few steps are no curve: they are not joined."))
    return notes
