"""The graph of a lineage as an SVG element: every job that a result was made from."""

from typing import Any

from markupsafe import Markup, escape

from snakechat.reporting.layered_layout import Layout, layered_layout
from snakechat.workflow.lineage import direct_inputs, lineage_columns

# Sizes of a job, gaps between jobs, and the margin, in pixels.
WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 158, 50, 46, 16, 6
# Characters of a name that fit into its box.
NAME_LENGTH = 22
# The class of a job's box in the style sheet, by the first word of its rule.
KINDS = {
    "import": "data",
    "split": "data",
    "tokenize": "data",
    "select": "data",
    "init": "model",
    "fetch": "model",
    "train": "training",
}


def lineage_svg(jobs: dict[str, Any], title: str) -> Markup:
    """Return the graph of a lineage, each job to the right of its inputs.

    A job has an edge from each input, except from those that are upstream of another input. Its
    box has the rule, the name and the first digits of the spec.
    """
    inputs = {job: direct_inputs(jobs, job) for job in jobs}
    layout = layered_layout(lineage_columns(jobs), inputs)
    width = (max(layout.columns.values()) + 1) * (WIDTH + GAP_X) - GAP_X + 2 * MARGIN
    height = (max(layout.positions.values()) + 1) * (HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN
    edges = "".join(f'<path d="{edge_path(layout, edge)}"/>' for edge in layout.routes)
    boxes = "".join(box(layout, job, entry) for job, entry in jobs.items())
    return Markup(
        f'<svg class="graph" role="img" aria-label="{escape(title)}" width="{width}"'
        f' viewBox="0 0 {width} {height:.0f}"><defs><marker id="arrow" viewBox="0 0 8 8" refX="7"'
        ' refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"/>'
        f'</marker></defs><g class="edges">{edges}</g>{boxes}</svg>'
    )


def centre(layout: Layout, node: Any, column: int) -> tuple[float, float]:
    """Return the left end and the vertical centre of a job or a lane, in pixels."""
    return (
        MARGIN + column * (WIDTH + GAP_X),
        MARGIN + layout.positions[node] * (HEIGHT + GAP_Y) + HEIGHT / 2,
    )


def edge_path(layout: Layout, edge: tuple[str, str]) -> str:
    """Return the path of an edge: curves between columns, straight lines through them."""
    route = layout.routes[edge]
    column = layout.columns[edge[0]]
    x, y = centre(layout, route[0], column)
    path = [f"M{x + WIDTH} {y:.1f}"]
    for number, node in enumerate(route[1:], column + 1):
        start = x + WIDTH, y
        x, y = centre(layout, node, number)
        middle = (start[0] + x) / 2
        path.append(f"C{middle} {start[1]:.1f} {middle} {y:.1f} {x} {y:.1f}")
        if node != route[-1]:
            path.append(f"H{x + WIDTH}")
    return "".join(path)


def box(layout: Layout, job: str, entry: dict[str, Any]) -> str:
    """Return the box of a job."""
    x, y = centre(layout, job, layout.columns[job])
    name = entry["name"]
    shown = name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"
    kind = KINDS.get(entry["rule"].partition("_")[0], "evaluation")
    lines = ((14, "rule", entry["rule"]), (29, "name", shown), (42, "spec", entry["spec"][:12]))
    texts = "".join(
        f'<text class="{kind_of}" x="12" y="{place}">{escape(text)}</text>'
        for place, kind_of, text in lines
    )
    return (
        f'<g class="job {kind}" transform="translate({x} {y - HEIGHT / 2:.1f})">'
        f"<title>{escape(job)}</title>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<path d="M3 6V{HEIGHT - 6}"/>{texts}</g>'
    )
