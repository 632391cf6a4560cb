"""The translation catalogues: complete, without unused texts, with the right placeholders."""

import re

import pytest
from babel.messages.pofile import read_po

import update_translations
from conftest import ROOT
from snakechat.reporting.translations import CATALOGUES, LOCALE, translations, translator
from snakechat.workflow.code_digests import code_digests


def test_a_text_is_translated_and_its_placeholders_replaced():
    chinese, english = translator("zh"), translator("en")
    assert (english("accuracy"), chinese("accuracy")) == ("accuracy", "准确率")
    assert english("accuracy on {dataset}", dataset="a") == "accuracy on a"
    assert chinese("accuracy on {dataset}", dataset="a") == "在 a 上的准确率"


def test_a_text_without_a_translation_appears_in_english():
    assert translator("zh")("a text of {recipe}", recipe="mine") == "a text of mine"


def test_unfinished_translations_are_not_used(tmp_path):
    path = tmp_path / "mine.po"
    path.write_text(
        'msgid ""\nmsgstr "Content-Type: text/plain; charset=utf-8\\n"\n\n'
        'msgid "a"\nmsgstr ""\n\n#, fuzzy\nmsgid "b"\nmsgstr "乙"\n\nmsgid "c"\nmsgstr "丙"\n',
        encoding="utf-8",
    )
    assert translations(str(path)) == {"c": "丙"}


@pytest.mark.parametrize("catalogue", CATALOGUES.values())
def test_catalogues_have_the_texts_of_the_pages_and_their_placeholders(catalogue):
    with open(LOCALE / catalogue, "rb") as file:
        messages = {message.id: message.string for message in read_po(file) if message.id}
    # `python scripts/update_translations.py` adds new texts.
    assert sorted(messages) == update_translations.extract()
    for text, translation in messages.items():
        placeholders = set(re.findall(r"{\w+}", text))
        assert not translation or placeholders == set(re.findall(r"{\w+}", translation)), text


def test_new_texts_are_added_unused_ones_removed_and_missing_ones_listed(tmp_path):
    path = tmp_path / "mine.po"
    path.write_text('msgid "old"\nmsgstr "旧"\n\nmsgid "kept"\nmsgstr "留"\n', encoding="utf-8")
    catalogue, missing = update_translations.update(path, ["kept", "new: 95 % of {n}"])
    assert missing == ["new: 95 % of {n}"]
    text = update_translations.format_catalogue(catalogue)
    assert 'msgid "kept"\nmsgstr "留"' in text and 'msgid "new: 95 % of {n}"\nmsgstr ""' in text
    assert "旧" not in text and "python-format" not in text
    path.write_text(text, encoding="utf-8")
    assert update_translations.format_catalogue(update_translations.update(path, ["kept"])[0])


PAGE = {"templates/page.html", "templates/style.css"}
SECTIONS = {"templates/sections.html", "templates/parts.html", *PAGE}


@pytest.mark.parametrize(
    ("program", "files"),
    [
        ("write_record", SECTIONS),
        ("compare_runs", SECTIONS),
        ("prompt_eval", {"templates/prompt_eval.html", *SECTIONS}),
        ("rw_eval", {"templates/rw_eval.html", *SECTIONS}),
    ],
)
def test_pages_depend_on_their_templates(program, files):
    digests = code_digests(ROOT / f"scripts/{program}.py")
    names = {*files, *(f"locale/{name}" for name in CATALOGUES.values())}
    found = {name for name in digests if not name.endswith(".py")}
    assert found == {f"snakechat/reporting/{name}" for name in names}


@pytest.mark.parametrize("stage", ["sft", "reward", "dpo", "rlhf"])
def test_no_page_and_no_card_makes_a_model_stale(stage):
    digests = code_digests(ROOT / f"scripts/train_{stage}.py")
    assert not [name for name in digests if "/reporting/" in name or not name.endswith(".py")]
