"""The statement of the training data."""

import re

import pytest

from snakechat.data.licenses import source_licenses
from snakechat.reporting.data_sources import data_sources
from snakechat.reporting.data_statement import statement_sections
from snakechat.reporting.html_pages import write_sections
from snakechat.reporting.translations import translator
from support.lineages import COMMIT, LINEAGE

LICENSES = source_licenses(LINEAGE, {"output/data/mine": "mit"})


def sections(language="en", lineage=LINEAGE, licenses=LICENSES):
    """Return the sections by title."""
    found = statement_sections("output/sft/mine", lineage, licenses, translator(language))
    return {section.title: section for section in found}


def plain(rows):
    return [[str(cell) for cell in row] for row in rows]


def test_sections_are_in_the_order_of_the_template():
    assert [re.match("[0-9.]+", title)[0] for title in sections()] == [
        "1",
        "2.1",
        "2.2",
        "2.5",
        "3",
    ]
    assert len(sections("zh")) == 5


def test_general_information():
    general = sections()["1 General information"]
    facts = dict(general.shown_tables[0].rows)
    assert facts["base model: base"] == f"lab/base @ {COMMIT}, licence llama3.2"
    assert facts["declared languages"] == "en, zh"
    assert facts["size of the data"].startswith("82")
    kinds = ["No commercial use", "The name of a published", "A published model has to say"]
    assert all(remark.startswith(kind) for remark, kind in zip(general.remarks, kinds, strict=True))


def test_each_dataset_is_in_the_list_of_its_kind():
    tables = {title[:3]: section.shown_tables for title, section in sections().items()}
    [public], [local], [synthetic] = (tables[number] for number in ("2.1", "2.2", "2.5"))
    row = ["public", f"lab/public @ {COMMIT}", "cc-by-nc-4.0", "en, zh"]
    assert plain(public.rows) == [[*row, "76256", "5103", "67200000"]]
    assert [row[0::2] for row in plain(local.rows)] == [["mine", "mit", "50", "1234"]]
    assert [row[:2] for row in plain(synthetic.rows)] == [
        ["picked", "generations/tiny"],
        ["toy", "generated (shop, seed 7)"],
    ]


def test_processing_lists_removed_rows_and_overlaps():
    removed, splits = sections()["3 Data processing"].shown_tables
    expected = [["public", "tie", "15"], ["public", "bad row", "1"], ["public", "excluded", "2"]]
    assert plain(removed.rows) == expected
    assert plain(splits.rows) == [
        ["mine: sft.train", "45", ""],
        ["public: sft.train", "15252", "reward.train 131"],
        ["public: reward.train", "30502", "sft.train 131"],
    ]


def test_results_of_earlier_versions_have_no_sizes():
    lineage = {
        path: entry | {"facts": {"commit": COMMIT, "dropped": {"train": {}}}}
        for path, entry in LINEAGE.items()
    }
    public = data_sources(lineage, {})[2]
    assert (public.rows, public.characters, public.phases) == ({}, None, {})
    assert sections(lineage=lineage)


def test_nothing_from_outside():
    lineage = {path: LINEAGE[path] for path in ("output/data/toy",)}
    found = sections(lineage=lineage, licenses={})
    assert found["2.1 Publicly available datasets"].remarks == ["None."]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_escapes_what_cards_declare(tmp_path, language):
    entry = LINEAGE["output/data/public"]
    hostile = entry | {"facts": entry["facts"] | {"commit": "<script>"}}
    found = sections(language, LINEAGE | {"output/data/public": hostile}).values()
    write_sections(tmp_path / "p.html", language, eyebrow="", title="Data", sections=list(found))
    text = (tmp_path / "p.html").read_text()
    assert "&lt;script&gt;" in text and "<script>" not in text
