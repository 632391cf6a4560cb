"""Imports of datasets from every source."""

import json

import pyarrow.parquet as pq
import pytest
import yaml

from conftest import Workflow, copy_sources
from snakechat.data.dialogues import render_prompt
from snakechat.data.records import turns_of
from support.files import write

RESPONSES = [
    "Yes, gladly.",
    'He said "no", twice.',
    "One line.\nAnother line.\r\nA third.",
    "好的。当然可以!",
    "はい 🙂",
    "A separator\u2028in the text",
    "null",
    "3.0",
    "{braces} and \\backslashes\\",
    "a\ttab",
]


def pairs(name, number):
    return [
        {
            "prompt": f"\n\nHuman: {name} {n}?\n\nAssistant:",
            "chosen": f" {RESPONSES[n % len(RESPONSES)]}",
            "rejected": f" {n}",
        }
        for n in range(number)
    ]


ROWS, HELD_OUT = pairs("train", 40), pairs("test", 10)


# Each function writes ROWS into a folder and returns the dataset's section of the config.


def glob(folder):
    write(folder / "part1.jsonl", ROWS[:20])
    write(folder / "part2.jsonl", ROWS[20:])
    write(folder / "old.jsonl", HELD_OUT)
    write(folder / "train.csv", HELD_OUT)
    return {"path": folder.name, "train": "part*.jsonl"}


def odd_names(folder):
    write(folder / "it's my {own} 数据/训练 集.jsonl", ROWS)
    return {"path": f"{folder.name}/it's my {{own}} 数据"}


# This one writes HELD_OUT in addition.


def git_clone(folder):
    write(folder / "data/train-00000-of-00001-6a7b8c.parquet", ROWS)
    write(folder / "data/test-00000-of-00001-9d0e1f.parquet", HELD_OUT)
    write(folder / ".git/lfs/objects/train.parquet", HELD_OUT)
    write(folder / ".git/train.jsonl", HELD_OUT)
    (folder / ".gitattributes").write_text("*.parquet filter=lfs\n")
    (folder / "README.md").write_text("# Pairs\n")
    (folder / "dataset_infos.json").write_text("{}")
    return {"path": folder.name}


SOURCES = {form.__name__: form for form in (glob, odd_names, git_clone)}

# Bad rows of every kind as lines of a file, and the start of the reason.
BAD_LINES = [
    (b'{"prompt": "a", "chosen": null, "rejected": "c"}', "column chosen is null"),
    (b'{"prompt": "a", "chosen": "b", "rejected": 7}', "rejected is int, expected text"),
    (b'{"prompt": "a", "chosen": "b"}', "column rejected is missing; the row has prompt, chosen"),
    (b'{"prompt": "a", "chosen": "b\xff\xfe", "rejected": "c"}', "text that is not UTF-8: "),
    (b'{"prompt": "a", "chosen": "b", "rej', "invalid JSON: "),
    (b'["a", "b", "c"]', "is list, expected an object with columns"),
]


def bad_lines(folder):
    write(folder / "a.jsonl", ROWS[:20])
    good = [json.dumps(row).encode() for row in ROWS[20:]]
    lines = [good[0], *(line for line, _ in BAD_LINES), *good[1:]]
    (folder / "more").mkdir()
    (folder / "more/b.jsonl").write_bytes(b"\n".join(lines))
    return {"path": folder.name}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A workflow in which one build has imported all datasets."""
    folder = tmp_path_factory.mktemp("imported")
    copy_sources(folder)
    datasets = {}
    for form in [*SOURCES.values(), bad_lines]:
        datasets[form.__name__] = {"format": "plain", **form(folder / form.__name__)}
    config = {"on_bad_row": "skip", "datasets": datasets}
    (folder / "mine.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    workflow = Workflow(folder, "--configfile", "mine.yaml")
    workflow.targets = [f"output/data/{name}.manifest.json" for name in datasets]
    workflow.process = workflow.snakemake(*workflow.targets, "--cores", "2", "--keep-going")
    return workflow


def manifest(workflow, name):
    path = workflow.folder / f"output/data/{name}.manifest.json"
    if not path.exists():
        pytest.fail(f"{path} was not built:\n{workflow.process.stdout[-5000:]}")
    return json.loads(path.read_text())


def records(workflow, name, split="train"):
    assert manifest(workflow, name)
    table = pq.read_table(workflow.folder / f"output/data/{name}/{split}.parquet")
    rows = table.drop_columns(["digest"]).to_pylist()
    return [{**row, "prompt": render_prompt(turns_of(row["prompt"]))} for row in rows]


def test_all_sources_are_built_and_then_up_to_date(imported):
    assert imported.process.returncode == 0, imported.process.stdout[-5000:]
    process = imported.snakemake(*imported.targets, "-n")
    assert process.returncode == 0 and "Nothing to be done" in process.stdout, process.stdout


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same_records(imported, source):
    assert records(imported, source) == ROWS
    assert manifest(imported, source)["facts"]["dropped"]["train"] == {}


def test_eval_files_become_the_eval_split(imported):
    assert records(imported, "git_clone", "eval") == HELD_OUT


def test_bad_rows_are_skipped_counted_and_listed(imported):
    assert records(imported, "bad_lines") == ROWS
    number = len(BAD_LINES)
    assert manifest(imported, "bad_lines")["facts"] == {
        "dropped": {"train": {"bad row": number}},
        "source_rows": {"train/a.jsonl": 20, "train/more/b.jsonl": 20 + number},
        "licence": None,
        "size": {"train": {"rows": len(ROWS)}},
    }
    text = (imported.folder / "output/data/bad_lines/bad_rows.jsonl").read_text()
    listed = [json.loads(line) for line in text.splitlines()]
    assert [(bad["file"], bad["row"]) for bad in listed] == [
        ("more/b.jsonl", row) for row in range(2, number + 2)
    ]
    for bad, (_, reason) in zip(listed, BAD_LINES, strict=True):
        assert bad["reason"].startswith(reason)
    split = json.loads((imported.folder / "output/data/bad_lines/stats.json").read_text())["train"]
    assert split["rows"] == len(ROWS) and split["dropped"] == {"bad row": number}
