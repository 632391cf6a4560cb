"""HTML pages in the one design of templates/page.html, each complete in one file.

All values are escaped; figures are markup. Name a template by a string literal, so that code
digests find the templates that a program renders.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from snakechat.reporting.formatting import format_significant
from snakechat.reporting.page_parts import Section
from snakechat.reporting.pages import HTML
from snakechat.reporting.translations import translator


def write_html(path: Path, template: str, language: str, /, **values: Any) -> None:
    """Render a template that extends page.html to a file.

    Args:
        values: `eyebrow` (the kind of page), `title`, and what the template needs; optionally
            `subtitle` and `chapter`.
    """
    optional = {"subtitle": "", "chapter": None, "_": translator(language), "language": language}
    text = PAGES.get_template(template).render(**{**optional, **values})
    path.write_text(text, encoding="utf-8")


def write_sections(
    path: Path, language: str, /, *, sections: Sequence[Section], **values: Any
) -> None:
    """Write a page of cards, remarks and sections (page_parts.py).

    Args:
        values: As of write_html; optionally `cards`, `remarks`, `links` (paths and names of files
            with the same numbers) and `notes` (small print).
    """
    optional = {"cards": (), "remarks": (), "links": (), "notes": (), "sections": sections}
    write_html(path, "sections.html", language, **{**optional, **values})


def format_cell(value: Any) -> str:
    """Format a cell: text as it is, numbers with three digits, None as an empty cell."""
    if value is None:
        return ""
    return value if isinstance(value, str) else format_significant(value)


PAGES = HTML.overlay()
PAGES.filters = HTML.filters | {
    "cell": format_cell,
    "number": format_significant,
    "signed": partial(format_significant, signed=True),
}
