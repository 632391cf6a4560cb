"""Pages: escaping, control characters, tables, self-containment."""

import json
import re

import jinja2
import pytest
from markupsafe import Markup

from snakechat.reporting import pages
from snakechat.reporting.pages import render, take_svg, write_page

ATTACK = " \0<script>alert(1)</script>\n\nHuman: <img src=x onerror=y> & </td>{{ 1 }}"


@pytest.fixture
def templates(tmp_path, monkeypatch):
    """Templates of a test in addition to those of the package."""
    loader = jinja2.ChoiceLoader([jinja2.FileSystemLoader(tmp_path), pages.HTML.loader])
    for environment in (pages.HTML, pages.MARKDOWN):
        monkeypatch.setattr(environment, "loader", loader)
        environment.cache.clear()
    yield tmp_path
    for environment in (pages.HTML, pages.MARKDOWN):
        environment.cache.clear()


def test_values_are_escaped_and_control_characters_visible(templates):
    (templates / "test.html").write_text("<td>{{ value }}</td>")
    text = render("test.html", value=ATTACK)
    assert "<script" not in text and "<img" not in text and "{{ 1 }}" in text
    assert "␀&lt;script&gt;alert(1)&lt;/script&gt;\n\nHuman:" in text


def test_only_markup_is_not_escaped(templates):
    (templates / "test.html").write_text("{{ plot }}{{ text }}")
    assert render("test.html", plot=Markup("<svg/>"), text="<svg/>") == "<svg/>&lt;svg/&gt;"


def test_a_value_that_a_template_does_not_get_is_an_error(templates):
    (templates / "test.html").write_text("{{ missing }}")
    with pytest.raises(jinja2.UndefinedError):
        render("test.html")


def test_pages_load_nothing(tmp_path):
    path = tmp_path / "page.html"
    values = {"head": [], "rows": [["<b>", "<i>"]], "plot": Markup("<svg></svg>")}
    write_page(
        path, "zero.html", language="en", title="<script>", summary=["<u>"], notes=["<s>"], **values
    )
    text = path.read_text()
    assert not re.search("<(script|b|i|u|s)>", text)
    assert text.count("&lt;script&gt;") == 2
    assert "default-src 'none'" in text and "@media print" in text
    assert "http://" not in text and "https://" not in text and "@import" not in text
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")


def test_text_in_markdown_makes_neither_cells_nor_tags_nor_links(templates):
    text = "a|b\n<img src=x> [here](http://there) & \"c\" 'd' \x1b"
    cell = "a&#124;b &lt;img src=x&gt; [here]&#40;http://there) &amp; \"c\" 'd' ␛"
    (templates / "test.md").write_text('{% from "tables.md" import table %}{{ table(head, rows) }}')
    assert render("test.md", head=["x", "y"], rows=[["k", text]]) == (
        f"| x | y |\n|---|---|\n| k | {cell} |\n"
    )
    assert render("test.md", head=[], rows=[["k", 1234]]) == "|  |  |\n|---|---|\n| k | 1,234 |\n"


def test_json_in_markdown_metadata_is_not_escaped(templates):
    (templates / "test.md").write_text("{{ names | tojson }}")
    assert json.loads(render("test.md", names=["a|b", 'c"'])) == ["a|b", 'c"']


def test_a_plot_moves_into_the_page(tmp_path):
    path = tmp_path / "plot.svg"
    path.write_text('<?xml version="1.0"?>\n<!DOCTYPE svg>\n<svg id="a"></svg>\n')
    assert take_svg(path) == Markup('<svg id="a"></svg>\n')
    assert not path.exists()
