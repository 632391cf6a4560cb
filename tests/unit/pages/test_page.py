"""Pages: numbers as text, tables of texts, escaping, figures."""

import ast
import math
import re

import jinja2
import pytest
from markupsafe import Markup

from conftest import ROOT
from snakechat.config.recipes import STAGES
from snakechat.pages.metrics import NAMES, TEXTS, Figure, format_duration, format_number, run_value
from snakechat.pages.page import Cell, Page, Section, Table, figure_cell, write_page, write_record
from snakechat.pages.trainings import MAX_POINTS, averaged, draw_lines
from support.pages import text_of, texts_in
from support.sources import code_digests

PAGES = ROOT / "scripts/snakechat/pages"

# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "value", "text"),
    [
        # Three significant digits, and a real minus sign.
        (format_number, 141184, "141,184"),
        (format_number, 12345.6, "12,300"),
        (format_number, 0.5, "0.500"),
        (format_number, -19.04, "\N{MINUS SIGN}19.0"),
        (format_number, -1.5e-7, "\N{MINUS SIGN}1.50e-07"),
        (format_number, 0.0, "0"),
        (format_number, math.nan, "nan"),
        (format_duration, 59, "59.0 s"),
        (format_duration, 86399.6, "24:00:00"),
        (lambda value: run_value("peak_memory_mb", value), 459, "0.459\xa0GB"),
    ],
)
def test_numbers_as_text(format, value, text):
    assert format(value) == text


@pytest.mark.parametrize(
    ("path", "figure", "text"),
    [
        ("ties", Figure(0.5), "50.0 %"),
        # Differences have a sign, and of shares percentage points.
        ("score", Figure(0.5, [-1.0, 2.0], scale=0), "+0.500 [-1.00, +2.00]"),
        ("ties", Figure(-0.0123, scale=0), "-1.2 pp"),
        # Digits in which the bounds of a narrow interval differ.
        ("score", Figure(48912.3, [48893.1, 48931.6]), "48,910 [48,890, 48,930]"),
        ("score", Figure(1.23456, [1.23446, 1.23466]), "1.2346 [1.2345, 1.2347]"),
        ("score", Figure(12345.6, [12345.6, 12345.6]), "12,300 [12,300, 12,300]"),
        ("score", Figure(12345.6, [11111.1, 13333.3]), "12,300 [11,100, 13,300]"),
    ],
)
def test_figures_as_text(path, figure, text):
    assert text_of(figure_cell(path, figure)) == text


# --- texts ----------------------------------------------------------------------------------------


def test_texts_are_used_and_translated_with_their_placeholders():
    keys, strings = set(), set()
    for path in (*PAGES.glob("*.py"), ROOT / "scripts/draw_page.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant):
                strings.add(node.value)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "translate":
                keys |= {each.value for each in node.args if isinstance(each, ast.Constant)}
    environment = jinja2.Environment(extensions=["jinja2.ext.i18n"])
    for path in PAGES.glob("templates/*"):
        found = environment.extract_translations(path.read_text(), gettext_functions=("_",))
        keys |= {text for _, _, text in found}
    # Others are in tables: by the kind of a remark, say.
    assert keys <= TEXTS.keys() <= keys | strings
    assert all(names["zh"] for group in NAMES.values() for names in group.values())
    for text in TEXTS.values():
        assert set(re.findall(r"{\w+", text["en"])) == set(re.findall(r"{\w+", text["zh"])), text


def test_pages_depend_on_their_templates_and_tables_and_models_do_not():
    digests = code_digests(ROOT / "scripts/draw_page.py")
    files = {path.relative_to(PAGES).as_posix() for path in PAGES.glob("t*/*")}
    # Cards are not results.
    assert {f"snakechat/pages/{name}" for name in files - {"templates/model_card.md"}} <= {*digests}
    for stage in STAGES:
        digests = code_digests(ROOT / f"scripts/train_{stage}.py")
        assert not [name for name in digests if "/pages/" in name or not name.endswith(".py")]


# --- markup ---------------------------------------------------------------------------------------


def test_a_record_in_markdown_has_its_tables_and_figures(tmp_path):
    figures = {"loss": Markup("<svg>1</svg>"), "<i>": Markup("<svg>2</svg>")}
    head = ["", "before", "after"]
    table = Table("Held | out", head, [["loss", Cell("2.13", "[2, 3]", "worse"), 0.98765]], "Note.")
    text = "x|y\n<img src=x> [here](http://there) & \"c\" 'd' \x1b"
    section = Section("SFT", figures, [table], [Table("Settings", [], [["a", text]])])
    cards = {"accuracy": Cell("61 %", "[58 %, 64 %]")}
    write_record(tmp_path, Page("Training record", "sft/mine", [section], cards=cards))
    record = (tmp_path / "record.md").read_text()
    assert record.startswith(
        "# sft/mine\n\nTraining record\n\n- accuracy: 61 % [58 %, 64 %]\n\n## SFT"
    )
    assert "\n![&lt;i&gt;](figure-2.svg)\n" in record
    assert "\n|  | before | after |\n|---|---|---|\n| loss | 2.13 ▼ [2, 3] | 0.988 |\n" in record
    escaped = "x&#124;y &lt;img src=x&gt; [here]&#40;http://there) &amp; \"c\" 'd' \\x1b"
    assert f"\n| a | {escaped} |\n" in record
    assert (tmp_path / "figure-2.svg").read_text() == "<svg>2</svg>"


def test_pages_escape_texts_load_nothing_and_follow_the_theme(tmp_path):
    table = Table("<b>", ["", "<i>"], [["<u>", Cell("1", "<s>", "better")], ["x", 0.98765]])
    section = Section("<h>", {"<q>": Markup("<svg></svg>")}, [table])
    texts = Table("<em>", ["", "<tt>"], [["x", "<li> \0\n\n{{ 1 }}"]], has_texts=True)
    sections = [section, section._replace(title="<dt>", folded=[texts])]
    page = Page("<a>", "<script>", sections, {"<em>": Cell("1")}, ["<tt>"], ["<tt>"])
    write_page(tmp_path / "page.html", "en", page)
    text = (tmp_path / "page.html").read_text()
    assert not re.search("<(script|b|i|u|s|h|q|a|em|tt)>", text)
    assert text.count("&lt;script&gt;") == 2 and "<td>0.988</td>" in text
    assert '<td class="better"><span class="value">1</span>' in text
    assert '<td data-label="&lt;tt&gt;">&lt;li&gt; \\x00\n\n{{ 1 }}</td>' in text
    # Only markup is not escaped.
    assert text.count("<svg></svg>") == 2
    assert "default-src 'none'" in text
    assert "@media print" in text and "prefers-color-scheme: dark" in text
    assert not re.search("https?://|@import", text)
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")


# --- figures --------------------------------------------------------------------------------------


def test_neighbouring_steps_and_seeds_are_averaged():
    points = [(step, step / 2) for step in range(1, 3 * MAX_POINTS + 1)]
    assert len(averaged(points)) == MAX_POINTS
    assert averaged(points)[:2].tolist() == [[2, 1, 0.5, 1.5], [5, 2.5, 2, 3]]
    seeds = [(1, 1.0), (2, 4.0), (1, 3.0)]
    assert averaged(seeds).tolist() == [[1, 2, 1, 3], [2, 4, 4, 4]]


def test_the_same_data_gives_the_same_bytes_and_figures_refer_to_ids_of_their_own():
    lines = {"a": [(1, 2.0), (2, 1.0)], "b": [], "c": [(0, 3.0)]}
    first, again, other = (draw_lines(title, lines) for title in ("a", "a", "b"))
    assert first == again
    ids = [set(re.findall(r'url\(#(.*?)\)|href="#(.*?)"', svg)) for svg in (first, other)]
    assert ids[0] and not ids[0] & ids[1]
    # Names are escaped, and text stays text for other scripts.
    points = [(1, 0.5)]
    svg = draw_lines("ties", {"<script>&": points, "损失": points}, percent=True)
    assert "&lt;script&gt;&amp;" in svg and "<script" not in svg
    assert "损失" in texts_in(svg, "text")
