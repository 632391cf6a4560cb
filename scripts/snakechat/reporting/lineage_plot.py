"""The plot of a lineage: every job that a result was made from."""

from pathlib import Path
from typing import Any

from snakechat.reporting.plots import COLOURS, plt, save_figure
from snakechat.workflow.lineage import direct_inputs, lineage_columns


def draw_lineage(path: Path, jobs: dict[str, Any]) -> None:
    """Plot the jobs of a lineage, each to the right of its inputs, with rule, name and spec."""
    columns = lineage_columns(jobs)
    positions = {
        job: (column, (len(members) - 1) / 2 - row)
        for column, members in enumerate(columns)
        for row, job in enumerate(members)
    }
    height = max(len(members) for members in columns)
    figure, panel = plt.subplots(figsize=(1.5 * len(columns), 1.1 * height), layout="constrained")
    style = {"boxstyle": "round", "facecolor": "white", "edgecolor": COLOURS[0]}
    boxes = {}
    for job, entry in jobs.items():
        text = f"{entry['rule']}\n{entry['name']}\n{entry['spec'][:12]}"
        drawn = panel.text(*positions[job], text, fontsize=8, ha="center", va="center", bbox=style)
        boxes[job] = drawn.get_bbox_patch()
    for job in jobs:
        for upstream in direct_inputs(jobs, job):
            arrow: dict[str, Any] = {"arrowstyle": "->", "color": "grey"}
            arrow |= {"patchA": boxes[upstream], "patchB": boxes[job]}
            panel.annotate(
                "", positions[job], xytext=positions[upstream], arrowprops=arrow, zorder=0
            )
    panel.set(xlim=(-0.6, len(columns) - 0.4), ylim=(-height / 2, height / 2))
    panel.axis("off")
    save_figure(figure, path)
