"""A row of a dataset of each kind in config.yaml, in its real layout, and its record."""

# Chinese texts have Chinese punctuation.

import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from import_dataset import import_split
from snakechat.data.cells import DroppedRow
from snakechat.data.dataset_files import split_files
from snakechat.data.formats import columns_of, record_of
from snakechat.data.records import read_texts, texts_of
from snakechat.data.sources import read_rows
from support.formats import (
    DATASETS,
    question,
)

WEBGPT = {
    "question": {
        "dataset": "triviaqa",
        "id": "6b2d0c8b",
        "full_text": "Voiced by Harry Shearer, what Simpsons character was Springfield's deacon?",
    },
    "quotes_0": {"title": ["Ned Flanders (simpsons.fandom.com)"], "extract": ["He is voiced by"]},
    "answer_0": "Ned Flanders [1, 2].",
    "tokens_0": {"prefix": [2, 7], "completion": [31]},
    "score_0": -0.25,
    "quotes_1": {"title": ["Timothy Lovejoy (wiki)", "Simpsons"], "extract": ["Rev.", "Voices"]},
    "answer_1": "Reverend Lovejoy [1].\n\nHe is voiced by Shearer [1][2] (see above).",
    "tokens_1": {"prefix": [2, 7], "completion": [31, 5]},
    "score_1": 0.25,
}
SHP = {
    "post_id": "qt3nxl",
    "domain": "askculinary_train",
    "upvote_ratio": 0.98,
    "history": "What's the best way to disassemble raspberries?\n\nLike this: [picture]",
    "c_root_id_A": "hkh25sc",
    "c_root_id_B": "hkh25lp",
    "created_at_utc_A": 1636822112,
    "created_at_utc_B": 1636822110,
    "score_A": 340,
    "score_B": 166,
    "human_ref_A": "Pectinex, perhaps?",
    "human_ref_B": "Raspberry juice will likely work.",
    "labels": 1,
    "seconds_difference": 2.0,
    "score_ratio": 2.05,
}
MIRACL_ZH = {
    "query_id": "3#0",
    "query": "中国历史上最后一个皇帝是谁?",
    "positive_passages": [
        {"docid": "8195#0", "title": "溥仪", "text": "溥仪是清朝末代皇帝。"},
        {"docid": "8195#4", "title": "溥仪", "text": "他在位三年。"},
    ],
    "negative_passages": [
        {"docid": "13#2", "title": "皇帝", "text": "皇帝是君主的称号。"},
        {"docid": "77#0", "title": "清朝", "text": "清朝建立于1636年。"},
    ],
}
MKQA = {
    "example_id": -7449157003522518870,
    "queries": {
        "en": "what is the capital of france",
        "ja": "フランスの首都は",
        "zh_cn": "法国首都",
    },
    "query": "what is the capital of france",
    "answers": {
        "en": [{"type": 5, "entity": "Q90", "text": "Paris", "aliases": ["City of Light"]}],
        "ja": [{"type": 5, "entity": "Q90", "text": "パリ", "aliases": []}],
        "zh_cn": [
            {"type": 5, "entity": "Q90", "text": "巴黎", "aliases": ["花都"]},
            {"type": 5, "entity": "Q90", "text": "巴黎市", "aliases": []},
        ],
    },
}
ROWS = {
    "webgpt_comparisons": (
        WEBGPT,
        (
            "\n\nHuman: Voiced by Harry Shearer, what Simpsons character was Springfield's deacon?"
            "\n\nAssistant:",
            " Reverend Lovejoy [1].\n\nHe is voiced by Shearer [1][2] (see above).",
            " Ned Flanders [1, 2].",
        ),
    ),
    "SHP": (
        SHP,
        (
            "\n\nHuman: What's the best way to disassemble raspberries?\n\nLike this: [picture]"
            "\n\nAssistant:",
            " Pectinex, perhaps?",
            " Raspberry juice will likely work.",
        ),
    ),
    "miracl-zh": (
        MIRACL_ZH,
        (
            question("中国历史上最后一个皇帝是谁?"),
            " 溥仪是清朝末代皇帝。",
            " 皇帝是君主的称号。",
        ),
    ),
    "mkqa-zh": (MKQA, (question("法国首都"), " 巴黎", None)),
}


def of_config(name, row):
    """Return the record of a row of a dataset in config.yaml."""
    dataset = DATASETS[name]
    columns = columns_of(dataset["format"], dataset.get("columns"))
    return texts_of(record_of(row, dataset["format"], columns))


@pytest.mark.parametrize("name", ROWS)
def test_row_in_a_file_becomes_a_record(name, tmp_path):
    # Parquet keeps lists and structs.
    row, record = ROWS[name]
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    assert [of_config(name, found) for _, found in read_rows(path)] == [record]


@pytest.mark.parametrize(
    ("train", "held_out", "test"),
    [
        # The branch of the config, and a clone of the main branch.
        ("default/train/0000.parquet", "default/validation/0000.parquet", "default/test/0.parquet"),
        ("askbaking/train.json", "askbaking/validation.json", "askbaking/test.json"),
    ],
)
def test_both_layouts_of_shp_are_read(train, held_out, test):
    paths = [".git/config", ".gitattributes", "README.md", test, train, held_out]
    dataset = DATASETS["SHP"]
    globs = {split: dataset[split] for split in ("train", "eval") if split in dataset}
    assert split_files(paths, globs) == {"train": [train], "eval": [held_out]}


def imported(folder, name, rows):
    """Import rows of a dataset. Returns the records and the reasons of dropped rows."""
    settings = SimpleNamespace(on_bad_row="fail", keep={}, **DATASETS[name])
    job = SimpleNamespace(settings=settings, result=folder, facts={}, spec={"name": name})
    source = folder / "source.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    import_split(job, "train", {"source.jsonl": source})
    return list(read_texts(folder / "train.parquet")), job.facts["dropped"]["train"]


def test_citation_marks_are_removed_from_webgpt(tmp_path):
    asks = {**WEBGPT, "question": {**WEBGPT["question"], "full_text": "What is x [1]?"}}
    other = {**asks, "answer_0": "Both [1, 12] of [it] (2) [a1].", "answer_1": "[3] x[4] [5]"}
    found, _ = imported(tmp_path, "webgpt_comparisons", [WEBGPT, other])
    assert [responses for _, *responses in found] == [
        [" Reverend Lovejoy.\n\nHe is voiced by Shearer (see above).", " Ned Flanders."],
        [" x", " Both of [it] (2) [a1]."],
    ]
    # The question is unchanged.
    assert found[1][0] == question("What is x [1]?")


# Incomplete rows.


def dropped_of(name, **changes):
    with pytest.raises(DroppedRow) as reason:
        of_config(name, {**ROWS[name][0], **changes})
    return str(reason.value)


def test_ties_of_webgpt_are_dropped():
    assert dropped_of("webgpt_comparisons", score_0=0.0, score_1=0.0) == "tie"
    assert dropped_of("webgpt_comparisons", score_0=0, score_1=-0.0) == "tie"
