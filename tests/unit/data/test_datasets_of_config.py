"""A row of a dataset of each kind in config.yaml, in its real layout, and its record."""

from types import SimpleNamespace

import pytest

from import_dataset import converted
from snakechat.data.formats import columns_of
from snakechat.data.records import texts_of
from support.configs import project_values
from support.files import as_parquet

DATASETS = project_values()["datasets"]
WEBGPT = {
    "question": {"dataset": "triviaqa", "full_text": "Which character of x [1] is the deacon?"},
    "answer_0": "Ned Flanders [1, 2].",
    "score_0": -0.25,
    "answer_1": "[3] Reverend [it] (2) [a1] Lovejoy [1].\n\nVoiced by x[4] [1][2] (see above).",
    "score_1": 0.25,
}
SHP = {
    "history": "What's the best way to disassemble raspberries?\n\nLike this: [picture]",
    "human_ref_A": "Pectinex, perhaps?",
    "human_ref_B": "Raspberry juice will likely work.",
    "labels": 1,
}
MIRACL_ZH = {
    "query": "中国历史上最后一个皇帝是谁?",
    "positive_passages": [{"text": "溥仪是清朝末代皇帝。"}, {"text": "他在位三年。"}],
    "negative_passages": [{"text": "皇帝是君主的称号。"}],
}
MKQA = {
    "queries": {"en": "what is the capital of france", "zh_cn": "法国首都"},
    "answers": {"en": [{"text": "Paris"}], "zh_cn": [{"text": "巴黎"}, {"text": "巴黎市"}]},
}
FINAL = 'Let\'s think step by step and output the final answer after "####".'
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
    "gsm8k": ({"question": "2 + 3?", "answer": "2 + 3 = 5\n#### 5"}, f"2 + 3? {FINAL}", None, None),
}


@pytest.mark.parametrize("name", ROWS)
def test_row_in_a_file_becomes_a_record(name, tmp_path):
    row, question, *responses = ROWS[name]
    # Parquet keeps lists and structs.
    (tmp_path / "source.parquet").write_bytes(as_parquet([row]))
    dataset = DATASETS[name]
    columns = columns_of(dataset["format"], dataset["columns"])
    settings = {"on_bad_row": "fail", "keep": {}, **dataset, "columns": columns}
    job = SimpleNamespace(
        settings=SimpleNamespace(**settings), spec={"name": name}, states=tmp_path
    )
    files = {"source.parquet": tmp_path / "source.parquet"}
    [row] = converted(job, "train", files)
    prompt = f"\n\nHuman: {question}\n\nAssistant:"
    assert texts_of(row[:3]) == (prompt, *responses)
