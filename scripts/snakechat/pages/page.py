"""Pages: remarks, sections, tables and rows by token as data, and the templates that show them.

Each page is complete in one file. All values are escaped: text from models and datasets appears as
it is and is never read as markup. Name a template by a string literal, so that code digests find
the templates that a program renders.
"""

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from snakechat.pages.metrics import (
    DIGITS,
    MAX_DIGITS,
    Figure,
    as_text,
    format_number,
    format_share,
    is_fraction,
    label_of,
    names_of,
    translate,
)
from snakechat.workflow.printable import printable_text

TEMPLATES = Path(__file__).with_name("templates")
# Tones of cells, by the sign of a change: 0, 1 or -1.
TONES = ("", "better", "worse")


class Cell(NamedTuple):
    """A cell of a table with an interval or a tone, or a result in large print.

    Attributes:
        value: The number.
        interval: Its interval, and further facts in small print.
        tone: "better" or "worse" for a difference that excludes 0.
    """

    value: str
    interval: str = ""
    tone: str = ""


class Token(NamedTuple):
    """A token of a row: its text, whether the loss counts it, and whether it is a special one."""

    text: str
    counts: bool
    is_special: bool


class Tokens(NamedTuple):
    """A cell of a table with the tokens of a text; kept: how many are left after truncation."""

    tokens: Sequence[Token]
    kept: str = ""


class Table(NamedTuple):
    """A table: the first cell of a row is its header. The head may be empty.

    has_texts: Whether the caption and the cells are texts of users and models, which keep their
        lines, and whether a phone shows each row as a block of lines.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    has_texts: bool = False


class Section(NamedTuple):
    """A section of a page: figures by what they show, with the unit; tables, and folded tables."""

    title: str
    figures: Mapping[str, Markup] = {}
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()


class Page(NamedTuple):
    """A page.

    Attributes:
        eyebrow: The kind of page, above the title.
        cards: The main results, by name.
        remarks: Sentences above the sections.
        notes: Small print below them.
    """

    eyebrow: str
    title: str
    sections: Sequence[Section]
    cards: Mapping[str, Cell] = {}
    remarks: Sequence[str] = ()
    notes: Sequence[str] = ()


def table_of(
    caption: str, rows: Mapping[str, Mapping[str, Any]], note: str = "", corner: str = ""
) -> Table:
    """Return the table of rows, by header: each maps columns, of which it may lack some, to cells.

    corner: What the headers are.
    """
    head = list(dict.fromkeys(key for row in rows.values() for key in row))
    cells = [[label, *(row.get(key) for key in head)] for label, row in rows.items()]
    return Table(caption, [corner, *head], cells, note)


def value_table(caption: str, values: Mapping[str, Any], note: str = "") -> Table:
    """Return the table of settings or measurements, in their order."""
    return Table(caption, [], [[key, as_text(value)] for key, value in values.items()], note)


def metric_table(
    caption: str,
    columns: Mapping[str, Callable[[str], Figure | None]],
    paths: Iterable[str],
    differences: bool = False,
) -> Table:
    """Return a table with a row for each metric that a column has.

    columns: By name, functions that return the figure at a path, or None if there is none.
    differences: Whether the figures are differences.
    """
    rows: list[list[Any]] = []
    for path in paths:
        figures = [figure_at(path) for figure_at in columns.values()]
        if any(figures):
            cells = [figure and figure_cell(path, figure) for figure in figures]
            rows.append([label_of(path), *cells])
    note = translate("differences_note") if differences else ""
    return Table(caption, ["", *columns], rows, note)


def figure_cell(path: str, figure: Figure) -> Cell:
    """Return the cell of a metric, or of a difference: better or worse if it excludes 0.

    Both number and interval have the digits in which the bounds of a narrow interval differ.
    """
    digits, notes, is_difference = DIGITS, [], figure.scale is not None
    if figure.interval:
        largest, width = max(map(abs, figure.interval)), figure.interval[1] - figure.interval[0]
        if math.isfinite(largest) and width > 0:
            differing = math.floor(math.log10(largest)) - math.floor(math.log10(width)) + 1
            digits = min(max(differing, DIGITS), MAX_DIGITS)
        low, high = (format_metric(path, end, is_difference, digits) for end in figure.interval)
        notes.append(f"[{low}, {high}]")
    if figure.n > 1:
        notes.append(f"n\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{figure.n}")
    better = {"higher": 1, "lower": -1}.get(names_of(path).get("better", ""), 0)
    text = format_metric(path, figure.value, is_difference, digits)
    return Cell(text, " ".join(notes), TONES[better * figure.direction])


def format_metric(path: str, value: float, signed: bool = False, digits: int = DIGITS) -> str:
    """Format a metric: fractions in percent, differences (signed) in percentage points."""
    return (
        format_share(value, signed) if is_fraction(path) else format_number(value, signed, digits)
    )


# --- files ----------------------------------------------------------------------------------------


def write_csv(path: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write the numbers of a page."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *rows])


def write_page(path: Path, language: str, page: Page) -> None:
    """Write an HTML page."""
    template = HTML.get_template("page.html")
    path.write_text(template.render(page._asdict(), language=language, _=translate), "utf-8")


def write_record(folder: Path, page: Page) -> None:
    """Write record.md with its figures, for sites that show Markdown, as GitHub does."""
    figures = [svg for section in page.sections for svg in section.figures.values()]
    for number, svg in enumerate(figures, 1):
        (folder / f"figure-{number}.svg").write_text(svg, encoding="utf-8")
    text = MARKDOWN.get_template("record.md").render(page._asdict())
    (folder / "record.md").write_text(text, encoding="utf-8")


def format_cell(value: Any) -> str:
    """Format a cell of a table: text as it is, numbers by format_number, None as an empty cell."""
    if value is None:
        return ""
    return value if isinstance(value, str) else format_number(value)


def of_texts(change: Callable[[str], str]) -> Callable[[Any], Any]:
    """Return a function that changes texts; other values, and markup of our own, stay."""
    return lambda value: (
        change(value) if isinstance(value, str) and not isinstance(value, Markup) else value
    )


def escape_markdown(text: str) -> Markup:
    """Escape a text for Markdown: on one line, without HTML, links or separators of table cells."""
    line = printable_text(" ".join(text.split()))
    # Quotation marks are harmless outside of attributes, and entities are not decoded in code.
    escaped = str(escape(line)).replace("&#34;", '"').replace("&#39;", "'")
    return Markup(escaped.replace("|", "&#124;").replace("](", "]&#40;"))


HTML = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=True,
    finalize=of_texts(printable_text),
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
HTML.filters["cell"] = format_cell
MARKDOWN = HTML.overlay(finalize=of_texts(escape_markdown))
