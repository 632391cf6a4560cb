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
from snakechat.workflow.printable import printable_text

TEMPLATES = Path(__file__).with_name("templates")


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


def without_control_characters(value: Any) -> Any:
    """Escape the control characters of a text, except in markup of our own."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return printable_text(value)


def escape_markdown(value: Any) -> Any:
    """Escape a text for Markdown: on one line, without HTML, links or separators of table cells."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    line = printable_text(" ".join(value.split()))
    # Quotation marks are harmless outside of attributes, and entities are not decoded in code.
    escaped = str(escape(line)).replace("&#34;", '"').replace("&#39;", "'")
    return Markup(escaped.replace("|", "&#124;").replace("](", "]&#40;"))


HTML = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=True,
    finalize=without_control_characters,
    keep_trailing_newline=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
HTML.filters["cell"] = format_cell
MARKDOWN = HTML.overlay(finalize=escape_markdown)
