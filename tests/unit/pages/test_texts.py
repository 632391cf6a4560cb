"""The tables of translations: complete, without unused texts, with the right placeholders."""

import ast
import re

import jinja2
import pytest
import yaml

from conftest import ROOT
from snakechat.pages.texts import CHINESE, NAMES
from support.sources import code_digests


def texts_of_pages():
    """The arguments of translate() in programs, and of _() in templates."""
    texts = set()
    for path in (ROOT / "scripts").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                name = getattr(node.func, "id", getattr(node.func, "attr", None))
                texts |= {node.args[0].value} if name == "translate" else set()
    environment = jinja2.Environment(extensions=["jinja2.ext.i18n"])
    for path in (ROOT / "scripts").rglob("templates/*"):
        found = environment.extract_translations(path.read_text(), gettext_functions=("_",))
        # With placeholders, a tuple of the text and None for each.
        texts |= {text if isinstance(text, str) else text[0] for _, _, text in found}
    return texts


def test_tables_have_the_texts_of_the_pages_and_their_placeholders():
    table = yaml.safe_load(CHINESE.read_text("utf-8"))
    assert table.keys() == texts_of_pages()
    assert all(names["zh"] for group in NAMES.values() for names in group.values())
    for text, translation in table.items():
        assert set(re.findall(r"{\w+}", text)) == set(re.findall(r"{\w+}", translation)), text


FILES = ("templates/page.html", "templates/parts.html", "templates/style.css")
FILES += ("templates/record.md", "templates/plots.mplstyle")
FILES += ("tables/metrics.yaml", "locale/zh.yaml")


def test_pages_depend_on_their_templates_and_tables():
    digests = code_digests(ROOT / "scripts/draw_page.py")
    assert {f"snakechat/pages/{name}" for name in FILES} <= digests.keys()


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "rlhf"])
def test_no_page_and_no_card_makes_a_model_stale(stage):
    digests = code_digests(ROOT / f"scripts/train_{stage}.py")
    assert not [name for name in digests if "/pages/" in name or not name.endswith(".py")]
