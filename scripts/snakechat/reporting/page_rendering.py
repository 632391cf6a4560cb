"""Pages from Jinja templates: HTML and Markdown, each complete in one file.

All values are escaped: text from models and datasets appears as it is and is never read as markup.
Name a template by a string literal, so that code digests find the templates that a program renders.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from snakechat.reporting.formatting import format_cell
from snakechat.reporting.page_parts import Card, Page
from snakechat.reporting.plots import Panel
from snakechat.reporting.translations import translate
from snakechat.workflow.printable import CONTROL_CODES

TEMPLATES = Path(__file__).with_name("templates")

# Control characters except tabs and line breaks, as the Unicode symbols for them or as escapes.
CONTROL_SYMBOLS: dict[int, int | str] = {
    **{code: f"\\u{code:04x}" for code in CONTROL_CODES},
    **{code: 0x2400 + code for code in range(32)},
    127: 0x2421,
}
for code in b"\t\n":
    del CONTROL_SYMBOLS[code]


def write_page(path: Path, language: str, page: Page) -> None:
    """Write an HTML page."""
    values = {"language": language, "_": translate, **page._asdict()}
    path.write_text(HTML.get_template("page.html").render(values), encoding="utf-8")


def write_record(folder: Path, page: Page) -> None:
    """Write record.md with its figures, for sites that show Markdown, as GitHub does."""
    figures: dict[Panel, str] = {}
    for section in page.sections:
        for panel in section.panels:
            name = f"figure-{len(figures) + 1}.svg"
            figures[panel] = name
            (folder / name).write_text(str(panel.svg), encoding="utf-8")
    text = MARKDOWN.get_template("record.md").render(page._asdict(), figures=figures)
    (folder / "record.md").write_text(text, encoding="utf-8")


def write_headline(path: Path, cards: Sequence[Card]) -> None:
    """Write the cards as a part of the start page of Snakemake's report."""
    text = HTML.get_template("report_headline.html").render(cards=cards)
    path.write_text(text, encoding="utf-8")


def show_control_characters(value: Any) -> Any:
    """Replace the control characters of a text by visible symbols."""
    return value.translate(CONTROL_SYMBOLS) if isinstance(value, str) else value


def escape_markdown(value: Any) -> Any:
    """Escape a text for Markdown: on one line, without HTML, links or separators of table cells."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    line = show_control_characters(" ".join(value.split()))
    # Quotation marks are harmless outside of attributes, and entities are not decoded in code.
    escaped = str(escape(line)).replace("&#34;", '"').replace("&#39;", "'")
    return Markup(escaped.replace("|", "&#124;").replace("](", "]&#40;"))


HTML = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=True,
    finalize=show_control_characters,
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
HTML.filters["cell"] = format_cell
MARKDOWN = HTML.overlay(finalize=escape_markdown)
