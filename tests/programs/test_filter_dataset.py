"""filter_dataset: the rows that filters remove, and who reads them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import filter_dataset
import split_dataset
from snakechat.data.exclusions import removed_rows
from snakechat.data.records import RecordWriter, record_digest
from snakechat.workflow.digests import file_digest
from snakechat.workflow.errors import InputError

ROWS = {
    "train": [("one", " a", None), ("two", " b", None), ("one", " a", None), ("held", " c", None)],
    "eval": [("held", " c", None), ("secret", " d", None)],
}
WEIGHTS = {"sft": 1, "reward": 1, "rlhf": 1}


def write(folder, rows):
    folder.mkdir()
    for split, records in rows.items():
        with RecordWriter(folder / f"{split}.parquet") as writer:
            for record in records:
                writer.write(record)
    return folder


@pytest.fixture
def run(tmp_path):
    """Return a function that filters rows; it returns the job."""

    def start(settings, rows=ROWS, words=None, **against):
        folder = tmp_path / "filtered"
        folder.mkdir()
        inputs = {"records": write(tmp_path / "records", rows)}
        inputs |= {f"against.{name}": write(tmp_path / name, of) for name, of in against.items()}
        files = {"words": file_digest(words)} if words else {}
        job = SimpleNamespace(
            spec={"name": "mine", "files": files},
            settings=SimpleNamespace(**settings),
            inputs=inputs,
            result=folder,
            placement={"words": str(words)} if words else {},
            facts={},
        )
        filter_dataset.main(job)
        return job

    return start


def numbers(job):
    return {
        path.stem: np.load(path, allow_pickle=False).tolist() for path in job.result.glob("*.npy")
    }


def test_rows_are_counted_and_listed_by_their_digests(run, tmp_path, capsys):
    words = tmp_path / "words.txt"
    words.write_text("secret\n")
    job = run({"exact_duplicates": True}, words=words)
    # Of duplicates in both splits, the one in the train split is removed.
    assert numbers(job) == {"train": [2, 3], "eval": [1]}
    removed = {
        "eval": {"words": 1, "exact_duplicates": 0},
        "train": {"words": 0, "exact_duplicates": 2},
    }
    assert job.facts["filtered"] == removed
    stats = json.loads((job.result / "stats.json").read_text())
    assert {split: of["removed"] for split, of in stats.items()} == removed
    listed = [json.loads(line) for line in (job.result / "filtered.jsonl").open()]
    digest = record_digest(ROWS["train"][0]).hex()
    entry = {"split": "train", "row": 2, "digest": digest, "filter": "exact_duplicates"}
    assert entry | {"of": digest} in listed
    assert "secret" not in (job.result / "filtered.jsonl").read_text()
    assert "mine: 2 of 4 train rows removed: words 0, exact_duplicates 2" in capsys.readouterr().out


def test_evaluation_sets(run):
    job = run({"decontaminate": ["bench"]}, bench={"eval": [("Two!", None, None)]})
    assert numbers(job) == {"train": [1], "eval": []}


def test_a_split_without_rows_is_an_error(run):
    with pytest.raises(InputError, match="the train split has no rows left of 4"):
        run({"characters": {"prompt": [9, 9]}}, rows={"train": ROWS["train"]})


def test_words_that_changed_since_they_were_planned_are_an_error(run, tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("secret\n")
    job = run({}, words=words)
    words.write_text("other\n")
    with pytest.raises(InputError, match=r"words[.]txt"):
        filter_dataset.main(job)


def split_rows(tmp_path, records, filtered=None):
    """Return the rows of each phase of a split."""
    result = tmp_path / f"split-{filtered is None}"
    result.mkdir()
    settings = {"seed": 1, "weights": WEIGHTS, "by": "row", "max_rows": None}
    inputs = {"records": records} | ({"filtered": filtered} if filtered else {})
    job = SimpleNamespace(spec={"name": "mine"}, settings=SimpleNamespace(**settings))
    job.inputs, job.result, job.facts = inputs, result, {}
    split_dataset.main(job)
    return {path.stem: np.load(path).tolist() for path in result.glob("*.npy")}


@pytest.mark.parametrize("splits", [("train",), ("train", "eval")])
def test_other_rows_stay_in_their_phases(run, tmp_path, splits):
    rows = [(f"prompt {number // 2}", " a", None) for number in range(60)]
    job = run({"exact_duplicates": True}, rows=dict.fromkeys(splits, rows[:30]) | {"train": rows})
    before = split_rows(tmp_path, job.inputs["records"])
    after = split_rows(tmp_path, job.inputs["records"], job.result)
    removed = numbers(job)
    for name, kept in after.items():
        split = name.rpartition(".")[2]
        gone = removed.get(split, removed["train"])
        assert kept == [number for number in before[name] if number not in gone]
    assert sum(map(len, before.values())) > sum(map(len, after.values()))


def test_what_reads_whole_records_removes_the_same_rows(run):
    job = run({"exact_duplicates": True})
    paths = {split: job.inputs["records"] / f"{split}.parquet" for split in ROWS}
    reader = SimpleNamespace(inputs={"filtered": job.result}, facts={})
    found = removed_rows(reader, {}, paths, "mine")
    assert {split: rows.tolist() for split, rows in found.items()} == {"train": [2, 3], "eval": []}
    reader.inputs = {}
    assert not any(len(rows) for rows in removed_rows(reader, {}, paths, "mine").values())
