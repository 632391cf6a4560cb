"""import_dataset: a build of a dataset, a file that changes, and what is read of rows."""

import json
from types import SimpleNamespace

import pytest
import yaml

import import_dataset
from conftest import Workflow, copy_sources
from snakechat.data.formats import columns_of
from snakechat.data.records import read_records, read_texts
from snakechat.workflow.errors import InputError
from support.configs import project_values
from support.files import as_jsonl, write

ROWS = [(f"\n\nHuman: {number}?\n\nAssistant:", f" {number}", " No.") for number in range(50)]
# Bad rows of every kind as lines of a file, and the start of the reason.
BAD_LINES = {
    b'{"prompt": "a", "chosen": null, "rejected": "c"}\n': "column chosen is null",
    b'{"prompt": "a", "chosen": "b\xff\xfe", "rejected": "c"}\n': "text that is not UTF-8: ",
    b'{"prompt": "a", "chosen": "b", "rej\n': "invalid JSON: ",
}
ROW = {"prompt": "a", "chosen": "b", "rejected": "c"}


def lines(rows):
    return as_jsonl([dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows])


def test_a_clone_with_bad_rows_is_imported(tmp_path):
    copy_sources(tmp_path)
    folder = tmp_path / "it's my {own} 数据"
    with_bad_rows = lines(ROWS[20:21]) + b"".join(BAD_LINES) + lines(ROWS[21:40])
    for name, content in {
        "more/train-00000-of-00002.jsonl": lines(ROWS[:20]),
        "more/train-00001-of-00002.jsonl": with_bad_rows,
        "test 集.jsonl": lines(ROWS[40:]),
        ".git/train.jsonl": lines(ROWS),
        "README.md": b"# Pairs\n",
        "dataset_infos.json": b"{}",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    dataset = {"path": folder.name, "format": "plain", "on_bad_row": "skip"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"datasets": {"mine": dataset}}))
    workflow = Workflow(tmp_path, "--configfile", "mine.yaml")
    workflow.build("output/data/mine.manifest.json")
    assert workflow.planned("output/data/mine.manifest.json") == set()
    result, number = tmp_path / "output/data/mine", len(BAD_LINES)
    assert list(read_texts(result / "train.parquet")) == ROWS[:40]
    assert list(read_texts(result / "eval.parquet")) == ROWS[40:]
    assert json.loads((result / "manifest.json").read_text())["facts"] == {
        "dropped": {"train": {"bad row": number}, "eval": {}},
        "licence": None,
        "size": {"train": {"rows": 40}, "eval": {"rows": 10}},
    }
    listed = [json.loads(line) for line in (result / "bad_rows.jsonl").read_text().splitlines()]
    assert [(bad["file"], bad["row"]) for bad in listed] == [
        ("more/train-00001-of-00002.jsonl", row) for row in range(2, number + 2)
    ]
    for bad, reason in zip(listed, BAD_LINES.values(), strict=True):
        assert bad["reason"].startswith(reason)


@pytest.fixture
def imported(tmp_path):
    """Import rows as a file of a kind and a dataset of the given keys; return its records."""

    def run(rows, format, kind="jsonl", **more):
        path = tmp_path / f"data/rows.{kind}"
        write(path, rows)
        settings = {"format": format, "on_bad_row": "fail", "card": {}, "keep": {}, **more}
        settings["columns"] = columns_of(format, more.get("columns"))
        job = SimpleNamespace(facts={}, settings=SimpleNamespace(**settings))
        job.spec = {"name": "mine", "files": {f"train/{path.name}": ""}}
        job.options = SimpleNamespace(source=str(path.parent))
        job.result, job.states = tmp_path / "made", tmp_path / "state"
        for folder in (job.result, job.states):
            folder.mkdir(exist_ok=True)
        import_dataset.main(job)
        return job.result / "train.parquet"

    return run


QUESTION, RESPONSE = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def test_a_dataset_without_remaining_rows_is_an_error_with_the_reasons(imported):
    with pytest.raises(InputError, match=r"has no rows left of 3 \(dropped: {'no response': 3}"):
        imported([{"messages": [QUESTION]}] * 3, "messages")


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow"])
def test_a_column_of_tools_is_read_though_nothing_names_it(imported, kind):
    messages = json.dumps([QUESTION, RESPONSE])
    tools = json.dumps([{"type": "function", "function": {"name": "look"}}])
    rows = [{"messages": messages, "tools": "[]"}, {"messages": messages, "tools": tools}]
    assert list(read_records(imported(rows, "messages", kind=kind))) == [
        ([("user", "a")], " b", None),
        ([("tools", tools), ("user", "a")], " b", None),
    ]


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow"])
@pytest.mark.parametrize(
    ("format", "key", "reason"),
    [
        ("plain", "image", "and models read text alone"),
        ("plain", "history", "which is not read: name it in `columns`"),
        ("messages", "system", "which is not read: name it in `columns`"),
    ],
)
def test_images_and_what_precedes_a_question_are_not_left_out(imported, kind, format, key, reason):
    row = {**ROW, "messages": json.dumps([QUESTION, RESPONSE])}
    with pytest.raises(InputError, match=f"row 2: the row has {key}, {reason}"):
        imported([{**row, key: each} for each in ("", "x")], format, kind=kind)


def test_what_is_removed_changes_neither_calls_nor_text_that_looks_like_one(imported):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "arguments": {}}]}
    dialogues = [[QUESTION, {**RESPONSE, "content": '<b>{"c": 1}'}], [QUESTION, call]]
    rows = [{"messages": messages} for messages in dialogues]
    path = imported(rows, "messages", remove=r"\s*<b>|look")
    text, message = (chosen for _, chosen, _ in read_records(path))
    assert text == ' {"c": 1}'
    assert json.loads(message)["tool_calls"][0]["function"]["name"] == "look"


# --- a row of a dataset of each kind in the config, in its real layout ------------------------

DATASETS = project_values()["datasets"]
WEBGPT = {
    "question": {"dataset": "triviaqa", "full_text": "Which character of x [1] is the deacon?"},
    "answer_0": "Ned Flanders [1, 2].",
    "score_0": -0.25,
    "answer_1": "[3] Reverend [it] (2) [a1] Lovejoy [1].\n\nVoiced by x[4] [1][2] (see above).",
    "score_1": 0.25,
}
MIRACL_ZH = {
    "query": "中国历史上最后一个皇帝是谁?",
    "positive_passages": [{"text": "溥仪是清朝末代皇帝。"}, {"text": "他在位三年。"}],
    "negative_passages": [{"text": "皇帝是君主的称号。"}],
}
FINAL = 'Let\'s think step by step and output the final answer after "####".'
# A row, and the texts of its record. Citation marks are removed from the responses of webgpt.
REAL_ROWS = {
    "webgpt_comparisons": (
        WEBGPT,
        "Which character of x [1] is the deacon?",
        " Reverend [it] (2) [a1] Lovejoy.\n\nVoiced by x (see above).",
        " Ned Flanders.",
    ),
    "miracl-zh": (MIRACL_ZH, MIRACL_ZH["query"], " 溥仪是清朝末代皇帝。", " 皇帝是君主的称号。"),
    "gsm8k": ({"question": "2 + 3?", "answer": "2 + 3 = 5\n#### 5"}, f"2 + 3? {FINAL}", None, None),
}


@pytest.mark.parametrize("name", REAL_ROWS)
def test_a_row_of_a_dataset_of_the_config_becomes_a_record(imported, name):
    row, question, *responses = REAL_ROWS[name]
    used = {"format", "columns", "remove", "prompt_template"} & DATASETS[name].keys()
    # Parquet keeps lists and structs.
    path = imported([row], kind="parquet", **{key: DATASETS[name][key] for key in used})
    assert list(read_texts(path)) == [(f"\n\nHuman: {question}\n\nAssistant:", *responses)]
