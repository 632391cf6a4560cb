"""Tables and figures of metrics, with a column of models or of groups of trainings."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from snakechat.reporting.formatting import format_estimate
from snakechat.reporting.labels import better_sign, is_fraction, label_of
from snakechat.reporting.metric_values import Figure
from snakechat.reporting.page_parts import Cell, Table
from snakechat.reporting.plots import Panel, draw_estimates
from snakechat.reporting.translations import translate

# By the names of columns, functions that return the figure at a path, or None if there is none.
Columns = Mapping[str, Callable[[str], Figure | None]]


def metric_table(
    caption: str,
    columns: Columns,
    paths: Iterable[str],
    differences: bool = False,
) -> Table:
    """Return a table with a row for each metric that a column has.

    differences: Whether the figures are differences, of which those whose interval excludes 0 are
        marked; otherwise the best value of a row is.
    """
    rows = []
    for path in paths:
        figures = [figure_at(path) for figure_at in columns.values()]
        if any(figures):
            rows.append([label_of(path), *figure_cells(path, figures, differences)])
    note = (
        translate(
            "Brackets contain 95 % intervals; pp: percentage points. ▲ and ▼ mark intervals that"
            " exclude 0, for the better and for the worse."
        )
        if differences
        else translate("★ marks the best value of a row, where one direction is better.")
    )
    return Table(caption, ["", *columns], rows, note)


def metric_panels(columns: Columns, paths: Iterable[str]) -> list[Panel]:
    """Return a figure of each metric that a column has."""
    panels = []
    for path in paths:
        figures = {name: figure_at(path) for name, figure_at in columns.items()}
        if any(figures.values()):
            panels.append(draw_estimates(label_of(path), figures, is_fraction(path)))
    return panels


def figure_cells(
    path: str, figures: Sequence[Figure | None], differences: bool = False
) -> list[Cell | None]:
    """Return the cells of a row, with the best value marked if there is a single one."""
    cells = [figure and figure_cell(path, figure, differences) for figure in figures]
    sign = better_sign(path)
    values = [sign * figure.value for figure in figures if figure]
    if differences or sign == 0 or len(values) < 2 or values.count(max(values)) > 1:
        return cells
    return [
        cell._replace(tone="best")
        if cell and figure and sign * figure.value == max(values)
        else cell
        for cell, figure in zip(cells, figures, strict=True)
    ]


def figure_cell(path: str, figure: Figure, is_difference: bool = False) -> Cell:
    """Return the cell of a metric, or of a difference: better or worse if it excludes 0."""
    text, small = format_estimate(path, figure.value, figure.interval, is_difference)
    if figure.n > 1:
        small = f"{small} n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{figure.n}".strip()
    cell = Cell(text, small)
    direction = better_sign(path) * figure.direction
    if is_difference and direction:
        return cell._replace(tone="better" if direction > 0 else "worse")
    return cell
