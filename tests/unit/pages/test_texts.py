"""The tables of texts: complete, without unused texts, with the right placeholders."""

import ast
import re

import jinja2

from conftest import ROOT
from snakechat.config.recipes import STAGES
from snakechat.pages.metrics import NAMES, TEXTS
from support.sources import code_digests

PAGES = ROOT / "scripts/snakechat/pages"


def test_texts_are_used_and_translated_with_their_placeholders():
    keys, strings = set(), set()
    for path in PAGES.glob("*.py"):
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
    # Cards are no results.
    assert {f"snakechat/pages/{name}" for name in files - {"templates/model_card.md"}} <= {*digests}
    for stage in STAGES:
        digests = code_digests(ROOT / f"scripts/train_{stage}.py")
        assert not [name for name in digests if "/pages/" in name or not name.endswith(".py")]
