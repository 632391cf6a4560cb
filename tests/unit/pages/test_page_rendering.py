"""Pages: escaping, control characters, tables, self-containment."""

import re

from markupsafe import Markup

from snakechat.pages.page import Cell, Page, Panel, Section, Table, write_page, write_record


def test_a_record_in_markdown_has_its_tables_and_figures(tmp_path):
    panels = [Panel("loss", Markup("<svg>1</svg>")), Panel("<i>", Markup("<svg>2</svg>"))]
    head = ["", "before", "after"]
    table = Table("Held | out", head, [["loss", Cell("2.13", "[2, 3]", "worse"), 0.98765]], "Note.")
    text = "x|y\n<img src=x> [here](http://there) & \"c\" 'd' \x1b"
    settings = Table("Settings", [], [["a", text]])
    section = Section("SFT", panels, tables=[table], folded=[settings])
    cards = {"accuracy": Cell("61 %", "[58 %, 64 %]"), "pairs": Cell("2,041")}
    write_record(tmp_path, Page("Training record", "sft/mine", [section], cards=cards))
    assert (
        (tmp_path / "record.md").read_text()
        == """\
# sft/mine

Training record

- accuracy: 61 % [58 %, 64 %]
- pairs: 2,041

## SFT

loss:

![loss](figure-1.svg)

&lt;i&gt;:

![&lt;i&gt;](figure-2.svg)

Held &#124; out

|  | before | after |
|---|---|---|
| loss | 2.13 ▼ [2, 3] | 0.988 |

Note.

Settings

|  |  |
|---|---|
| a | x&#124;y &lt;img src=x&gt; [here]&#40;http://there) &amp; "c" 'd' \\x1b |
"""
    )
    assert (tmp_path / "figure-2.svg").read_text() == "<svg>2</svg>"


def test_pages_load_nothing_and_follow_the_theme(tmp_path):
    path = tmp_path / "page.html"
    table = Table("<b>", ["", "<i>"], [["<u>", Cell("1", "<s>", "better")], ["x", 0.98765]])
    section = Section("<h>", [Panel("<q>", Markup("<svg></svg>"))], "<p>", [table])
    texts = Table("<em>", ["", "<tt>"], [["x", "<li> \0\n\n{{ 1 }}"]], has_texts=True)
    page = Page(
        eyebrow="<a>",
        title="<script>",
        sections=[section, section._replace(title="<dt>", folded=[texts])],
        cards={"<em>": Cell("1")},
        remarks=["<tt>"],
        notes=["<tt>"],
    )
    write_page(path, "en", page)
    text = path.read_text()
    assert not re.search("<(script|b|i|u|s|h|q|a|em|tt)>", text)
    assert text.count("&lt;script&gt;") == 2 and "<td>0.988</td>" in text
    assert '<td class="better"><span class="value">1</span>' in text
    assert '<td data-label="&lt;tt&gt;">&lt;li&gt; \\x00\n\n{{ 1 }}</td>' in text
    # Only markup is not escaped.
    assert text.count("<svg></svg>") == 2
    assert "default-src 'none'" in text
    assert "@media print" in text and "prefers-color-scheme: dark" in text
    assert "http://" not in text and "https://" not in text and "@import" not in text
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
