"""Pages as data: cards, remarks, sections, tables and their cells.

templates/page.html shows them. Texts are translated already.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from snakechat.reporting.plots import Panel


class Cell(NamedTuple):
    """A cell of a table with an interval or a tone.

    Attributes:
        value: The number.
        interval: Its interval, and further facts in small print.
        tone: "best" of the row; "better" or "worse" for a difference that excludes 0.
    """

    value: str
    interval: str = ""
    tone: Literal["", "best", "better", "worse"] = ""


class Card(NamedTuple):
    """A result in large print, with a note."""

    label: str
    value: str
    note: str = ""


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


def value_table(caption: str, values: Mapping[str, Any], note: str = "") -> Table:
    """Return the table of settings or measurements, by their keys."""
    return Table(caption, [], [[key, as_text(values[key])] for key in sorted(values)], note)


def as_text(value: Any) -> str:
    """Return a setting as text: strings as they are, all others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


class Section(NamedTuple):
    """A section of a page: figures, how to read them, tables, and folded tables."""

    title: str
    panels: Sequence[Panel] = ()
    caption: str = ""
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()


class Page(NamedTuple):
    """A page.

    Attributes:
        eyebrow: The kind of page, above the title.
        remarks: Sentences above the sections.
        notes: Small print below them.
    """

    eyebrow: str
    title: str
    sections: Sequence[Section]
    cards: Sequence[Card] = ()
    remarks: Sequence[str] = ()
    notes: Sequence[str] = ()
