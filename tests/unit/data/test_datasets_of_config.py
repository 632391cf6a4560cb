"""A row of a dataset of each kind in config.yaml, in its real layout, and its record."""

# Chinese texts have Chinese punctuation.

from types import SimpleNamespace

import pytest
import yaml

from conftest import ROOT
from import_dataset import import_split
from snakechat.data.dataset_files import split_files
from snakechat.data.formats import columns_of
from snakechat.data.records import read_texts
from support.files import as_parquet

DATASETS = yaml.safe_load((ROOT / "config.yaml").read_text())["datasets"]
WEBGPT = {
    "question": {"dataset": "triviaqa", "full_text": "Which character of x [1] is the deacon?"},
    "quotes_0": {"title": ["Ned Flanders (simpsons.fandom.com)"], "extract": ["He is voiced by"]},
    "answer_0": "Ned Flanders [1, 2].",
    "score_0": -0.25,
    "quotes_1": {"title": ["Timothy Lovejoy (wiki)", "Simpsons"], "extract": ["Rev.", "Voices"]},
    "answer_1": "[3] Reverend [it] (2) [a1] Lovejoy [1].\n\nVoiced by x[4] [1][2] (see above).",
    "score_1": 0.25,
}
SHP = {
    "domain": "askculinary_train",
    "history": "What's the best way to disassemble raspberries?\n\nLike this: [picture]",
    "score_A": 340,
    "score_B": 166,
    "human_ref_A": "Pectinex, perhaps?",
    "human_ref_B": "Raspberry juice will likely work.",
    "labels": 1,
    "score_ratio": 2.05,
}
MIRACL_ZH = {
    "query_id": "3#0",
    "query": "中国历史上最后一个皇帝是谁?",
    "positive_passages": [
        {"docid": "8195#0", "title": "溥仪", "text": "溥仪是清朝末代皇帝。"},
        {"docid": "8195#4", "title": "溥仪", "text": "他在位三年。"},
    ],
    "negative_passages": [{"docid": "13#2", "title": "皇帝", "text": "皇帝是君主的称号。"}],
}
MKQA = {
    "example_id": -7449157003522518870,
    "queries": {"en": "what is the capital of france", "zh_cn": "法国首都"},
    "query": "what is the capital of france",
    "answers": {
        "en": [{"type": 5, "entity": "Q90", "text": "Paris", "aliases": ["City of Light"]}],
        "zh_cn": [
            {"type": 5, "entity": "Q90", "text": "巴黎", "aliases": ["花都"]},
            {"type": 5, "entity": "Q90", "text": "巴黎市", "aliases": []},
        ],
    },
}
# A row, and the texts of its record. Citation marks are removed from the responses of webgpt.
ROWS = {
    "webgpt_comparisons": (
        WEBGPT,
        "Which character of x [1] is the deacon?",
        " Reverend [it] (2) [a1] Lovejoy.\n\nVoiced by x (see above).",
        " Ned Flanders.",
    ),
    "SHP": (SHP, SHP["history"], " Pectinex, perhaps?", " Raspberry juice will likely work."),
    "miracl-zh": (MIRACL_ZH, MIRACL_ZH["query"], " 溥仪是清朝末代皇帝。", " 皇帝是君主的称号。"),
    "mkqa-zh": (MKQA, "法国首都", " 巴黎", None),
}


@pytest.mark.parametrize("name", ROWS)
def test_row_in_a_file_becomes_a_record(name, tmp_path):
    row, question, *responses = ROWS[name]
    # Parquet keeps lists and structs.
    (tmp_path / "source.parquet").write_bytes(as_parquet([row]))
    dataset = DATASETS[name]
    columns = columns_of(dataset["format"], dataset["columns"])
    settings = {"on_bad_row": "fail", "keep": {}, **dataset, "columns": columns}
    job = SimpleNamespace(settings=SimpleNamespace(**settings), result=tmp_path)
    job.spec, job.facts = {"name": name}, {}
    import_split(job, "train", {"source.parquet": tmp_path / "source.parquet"})
    prompt = f"\n\nHuman: {question}\n\nAssistant:"
    assert list(read_texts(tmp_path / "train.parquet")) == [(prompt, *responses)]


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
