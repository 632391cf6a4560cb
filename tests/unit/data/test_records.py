"""Records and ragged arrays on disk."""

import json
import resource
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from snakechat.data import records
from snakechat.data.ragged_arrays import Ragged, open_ragged, save_array
from snakechat.data.records import (
    ROWS_AT_A_TIME,
    fingerprint,
    read_record_batches,
    read_records,
    read_texts,
    write_records,
    write_split,
)
from support.encoding import make_record

ROW = ("\n\nHuman: Can you help?\n\nAssistant:", " Of course.", " No.")


def write(path, rows):
    write_split(path, [make_record(*row) for row in rows])
    return path


TEXTS = ["", "\t \u3000", " é中🙂", "a\x00b", "\u2028\u2029\r\n", ' "b"', "\ufffd\ufeff"]


def test_texts_are_read_as_they_were_written(tmp_path):
    rows = [ROW, *((text, text, text) for text in TEXTS)]
    assert list(read_texts(write(tmp_path / "train.parquet", rows))) == rows
    path = write(tmp_path / "eval.parquet", [])
    assert list(read_texts(path)) == list(read_records(path, np.array([], np.int64))) == []


def test_kept_cells_are_read_where_they_are_asked_for(tmp_path):
    path = tmp_path / "train.parquet"
    rows = [(*make_record("p"), "7", '"p"'), (*make_record(*ROW), "null", "[]")]
    write_split(path, rows, ["solution", "prompt"])
    assert list(read_texts(path)) == [("p", None, None), ROW]
    [batch] = read_record_batches(path, columns=("prompt", "kept_solution"))
    question = [("user", "Can you help?")]
    assert batch == {"prompt": [[("unmarked", "p")], question], "kept_solution": ["7", "null"]}
    without = write(tmp_path / "without.parquet", [ROW])
    [batch] = read_record_batches(without, columns=("prompt", "kept_solution"))
    assert batch == {"prompt": [question]}


def test_a_part_of_the_rows_is_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MAX_GROUP_BYTES", 1_000_000)
    path = write(tmp_path / "train.parquet", [("p", f"{i:100000}", None) for i in range(100)])
    assert pq.read_metadata(path).num_row_groups == 10
    before, numbers = pa.total_allocated_bytes(), np.arange(100)
    for rows in (None, numbers):
        for _ in read_record_batches(path, rows):
            assert pa.total_allocated_bytes() - before < 3_000_000


def test_selected_rows_are_repeated_as_often_as_selected(tmp_path):
    # A row group and one row more than two of them. The prompts are the row numbers.
    end = ROWS_AT_A_TIME
    path = write(tmp_path / "train.parquet", ((f"{i}", "", None) for i in range(2 * end + 1)))
    # The last row of a group and the first of the next; the only row of the third.
    for rows in ([0, end - 1, end - 1, end, end], [5, 2 * end]):
        found = read_records(path, np.array(rows, np.int64))
        assert [int(turns[0][1]) for turns, _, _ in found] == rows


def test_a_few_records_are_counted_as_by_hand(tmp_path):
    rows = [ROW, ROW, ("How?", " So.", None), (f" {ROW[0]}\n", " Thus.", " Certainly not.")]
    job = SimpleNamespace(result=tmp_path, facts={}, spec={"name": "mine"})
    records = [make_record(*row) for row in rows]
    write_records(job, {"train": ["tie", *records, "bad row", "tie"]})
    assert list(read_records(tmp_path / "train.parquet")) == records
    dropped = {"bad row": 1, "tie": 2}
    assert job.facts == {"dropped": {"train": dropped}, "size": {"train": {"rows": 4}}}
    # The prompts of the second and the fourth were there before.
    expected = {"train": {"rows": 4, "repeated_prompts": 2, "dropped": dropped}}
    assert json.loads((tmp_path / "stats.json").read_text()) == expected


def test_fingerprints_ignore_whitespace_around_texts_only():
    assert fingerprint(" \n Why not?\t") == fingerprint("Why not?")
    # blake2b of no bytes, 8 bytes long, in every process.
    assert fingerprint("  ") == 0xE4A6A0577479B2B4
    assert fingerprint("Why not?") != fingerprint("Why  not?")


# --- ragged arrays ----------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
@pytest.mark.parametrize("longest", [0, 9, 123456])
def test_batches_are_read_as_one_array_of_views_that_cannot_be_written(
    tmp_path, longest, vocab_size, dtype
):
    # After the first batch, the header would say 2 tokens; in the end, the number has six digits.
    pieces = [[[1, 2], []], [], [[3]], [[], []], [[4, 5, vocab_size - 1], [7] * longest]]
    with open_ragged(tmp_path, "ids", vocab_size) as write_rows:
        for piece in pieces:
            write_rows(piece)
    ragged = Ragged(tmp_path, "ids")
    rows = [row for piece in pieces for row in piece]
    assert [ragged[row].tolist() for row in range(len(ragged))] == rows
    assert ragged.lengths.tolist() == list(map(len, rows))
    # The smallest type for the vocabulary.
    assert isinstance(ragged.ids, np.memmap) and ragged.ids.dtype == dtype
    assert len(ragged.ids) == longest + 6
    with pytest.raises(ValueError, match="read-only"):
        ragged[0][0] = 7


# numpy.save itself truncates the smaller one.
@pytest.mark.parametrize("number", [100, 5000])
def test_an_array_that_the_disk_cannot_hold_is_an_error(tmp_path, number):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_array(tmp_path / "rows.npy", np.zeros(number))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
