"""Plots of the data of a recipe: rows of each phase, lengths, repetitions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from snakechat.reporting.plots import COLOURS, figure_with_panels, save_figure

Statistics = Mapping[str, Any]


def draw_data(path: Path, statistics: Mapping[str, Statistics], stages: tuple[str, ...]) -> None:
    """Plot what happened to the rows of each phase, their lengths, and repetitions in datasets.

    statistics: stats.json of each job, by input name (records.DATASET, rows.DATASET, tokens.STAGE).
    """
    tokens = {
        stage: statistics[f"tokens.{stage}"]["train"]
        for stage in stages
        if f"tokens.{stage}" in statistics
    }
    figure, panels = figure_with_panels(3)
    _draw_rows(panels[0], tokens)
    _draw_lengths(panels[1], tokens)
    _draw_repetitions(panels[2], statistics)
    save_figure(figure, path)


def _draw_rows(panel: Axes, tokens: Mapping[str, Statistics]) -> None:
    """Plot the training rows of each phase: complete, truncated, and dropped by reason."""
    reasons = sorted({reason for phase in tokens.values() for reason in phase["dropped"]})
    for place, phase in enumerate(tokens.values()):
        counts = {"complete": phase["rows"] - phase["truncated"], "truncated": phase["truncated"]}
        counts |= phase["dropped"]
        left = 0
        for number, kind in enumerate(["complete", "truncated", *reasons]):
            label = kind if place == 0 else None
            width = counts.get(kind, 0)
            panel.barh(place, width, left=left, color=COLOURS[number % 8], label=label)
            left += width
    panel.set_yticks(range(len(tokens)), list(tokens))
    panel.set(xlabel="training rows")
    panel.set_xlim(0, 1.05 * panel.dataLim.x1)
    panel.invert_yaxis()
    panel.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0, 1))


def _draw_lengths(panel: Axes, tokens: Mapping[str, Statistics]) -> None:
    """Plot lengths in tokens: the median, boxes from p10 to p90, whiskers from p1 to p99."""
    boxes = [
        {
            "label": f"{stage} {name}",
            "med": lengths["p50"],
            "q1": lengths["p10"],
            "q3": lengths["p90"],
            "whislo": lengths["p1"],
            "whishi": lengths["p99"],
        }
        for stage, phase in tokens.items()
        for name, lengths in phase["tokens"].items()
    ]
    style: dict[str, Any] = {
        name: {"color": COLOURS[0]}
        for name in ("boxprops", "medianprops", "whiskerprops", "capprops")
    }
    panel.bxp(boxes, orientation="horizontal", showfliers=False, **style)
    panel.set(xlabel="length (tokens; p1, p10, p50, p90, p99)")
    panel.invert_yaxis()
    panel.grid(alpha=0.3)


def _draw_repetitions(panel: Axes, statistics: Mapping[str, Statistics]) -> None:
    """Plot, for each dataset, repeated and shared prompts and how often chosen is longer."""
    names = [name.partition(".")[2] for name in statistics if name.startswith("records.")]
    for place, name in enumerate(names):
        records = statistics[f"records.{name}"]["train"]
        splits = statistics[f"rows.{name}"].values()
        # Of each split of a phase, its largest overlap with another phase.
        shared = sum(
            max(split.get("rows_whose_prompt_is_in", {"": 0}).values()) for split in splits
        )
        fractions = {
            "prompt repeated": records["repeated_prompts"] / records["rows"],
            "prompt also in another phase": shared / max(sum(s["rows"] for s in splits), 1),
            "chosen response is the longer one": records.get("chosen_longer_share", 0),
        }
        for offset, (label, fraction) in enumerate(fractions.items()):
            panel.barh(
                place + 0.25 * offset,
                fraction,
                0.22,
                color=COLOURS[offset],
                label=label if place == 0 else None,
            )
    panel.set_yticks([place + 0.25 for place in range(len(names))], names)
    panel.set(xlabel="fraction of rows", xlim=(0, 1))
    panel.invert_yaxis()
    panel.legend(fontsize="small", loc="lower left", bbox_to_anchor=(0, 1))
