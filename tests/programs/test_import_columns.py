"""Columns of an import: joined, kept under another name, and unused."""

import json
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

import import_dataset
from snakechat.algorithms.reward_functions import load_functions
from snakechat.data.formats import columns_of, named_columns
from snakechat.data.records import read_records
from snakechat.workflow.digests import file_digest
from snakechat.workflow.job import Job
from snakechat.workflow.placement import SERIAL
from snakechat.workflow.run_options import RunOptions
from support.files import write

ALPACA = [
    {"instruction": "Name a color.", "input": "", "output": "Blue.", "source": "seed"},
    {"instruction": "Translate to French.", "input": "cat", "output": "chat", "source": "seed"},
]


def answers_score(responses, cells):
    """Return the scores of math_answer for solutions that are kept as JSON."""
    _, function = load_functions({"math_answer": 1})["math_answer"]
    columns = {"solution": list(map(json.loads, cells))}
    return function(["p"] * len(responses), responses, columns).tolist()


@pytest.fixture
def imported(tmp_path):
    """Import a file as a dataset of the given keys; return the folder of the result."""

    def run(path, format, columns=None, keep=(), **more):
        settings = {
            "format": format,
            "on_bad_row": "fail",
            "card": {},
            "columns": columns_of(format, columns),
            "keep": named_columns(keep),
            **more,
        }
        spec = {"rule": "import_dataset", "name": "mine", "path": str(tmp_path / "result")}
        spec |= {"settings": settings, "inputs": {}}
        spec["files"] = {f"train/{path.name}": file_digest(path)}
        options = RunOptions(source=str(path.parent), store=str(tmp_path / "store"))
        job = Job(spec, {}, SERIAL, options, SimpleNamespace)
        job.result.mkdir(parents=True, exist_ok=True)
        import_dataset.main(job)
        return job.result

    return run


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_columns_are_joined(imported, tmp_path, kind):
    write(tmp_path / f"data/rows.{kind}", ALPACA)
    columns = {"prompt": ["instruction", "input"], "chosen": "output"}
    result = imported(tmp_path / f"data/rows.{kind}", "instruct", columns)
    prompts = [repr(prompt) for prompt, _, _ in read_records(result / "train.parquet")]
    assert "Name a color." in prompts[0]
    assert r"Translate to French.\ncat" in prompts[1]


def test_a_column_is_kept_under_the_name_of_a_parameter(imported, tmp_path):
    row = {"question": "How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"}
    write(tmp_path / "data/rows.jsonl", [row])
    result = imported(
        tmp_path / "data/rows.jsonl", "prompt", {"prompt": "question"}, {"solution": "answer"}
    )
    [cell] = pq.read_table(result / "train.parquet")["kept_solution"].to_pylist()
    assert answers_score(["It is 7."], [cell]) == [1]


@pytest.mark.parametrize(
    ("prompts", "is_warned"),
    [
        (["When does it open?", "Where is it?"], True),
        (["When does it open?", "\n\nHuman: Where is it?\n\nAssistant:"], False),
    ],
)
def test_prompts_of_plain_without_any_marker_are_a_warning(
    imported, tmp_path, capfd, prompts, is_warned
):
    rows = [{"prompt": prompt, "chosen": "a", "rejected": "b"} for prompt in prompts]
    write(tmp_path / "data/rows.jsonl", rows)
    imported(tmp_path / "data/rows.jsonl", "plain")
    warning = "no prompt of the train split has a marker"
    assert (warning in capfd.readouterr().err) == is_warned
    imported(tmp_path / "data/rows.jsonl", "instruct")
    assert warning not in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_of_tools_is_read_though_nothing_names_it(imported, tmp_path, kind):
    messages = json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    tools = json.dumps([{"type": "function", "function": {"name": "look"}}])
    rows = [{"messages": messages, "tools": "[]"}, {"messages": messages, "tools": tools}]
    path = tmp_path / f"data/rows.{kind}"
    write(path, rows)
    assert list(read_records(imported(path, "messages") / "train.parquet")) == [
        ([("user", "a")], " b", None),
        ([("tools", tools), ("user", "a")], " b", None),
    ]


def test_what_is_removed_changes_neither_calls_nor_text_that_looks_like_one(imported, tmp_path):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "look", "arguments": {}}]}
    dialogues = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": '<b>{"c": 1}'}],
        [{"role": "user", "content": "a"}, call],
    ]
    path = tmp_path / "data/rows.jsonl"
    write(path, [{"messages": messages} for messages in dialogues])
    result = imported(path, "messages", remove=r"\s*<b>|look")
    text, message = (chosen for _, chosen, _ in read_records(result / "train.parquet"))
    assert text == ' {"c": 1}'
    assert json.loads(message)["tool_calls"][0]["function"]["name"] == "look"
