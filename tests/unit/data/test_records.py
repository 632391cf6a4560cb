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
    open_records,
    read_record_batches,
    read_records,
    read_texts,
    write_records,
)
from support.dialogues import make_record

ROW = ("\n\nHuman: Can you help?\n\nAssistant:", " Of course.", " No.")
# A row group and one row more than two of them.
SEVERAL = 2 * ROWS_AT_A_TIME + 1


def write(path, rows):
    with open_records(path) as append:
        for row in rows:
            append(make_record(*row))
    return path


def numbered(path, number):
    """Write records with the prompts "0", "1", ..., which are their row numbers."""
    return write(path, ((str(i), " yes", None) for i in range(number)))


def chosen_rows(path, rows):
    return [int(turns[0][1]) for turns, _, _ in read_records(path, np.array(rows, dtype=np.int64))]


TEXTS = ["", "\t \u3000", " é中🙂", "a\x00b", "\u2028\u2029\r\n", ' "b"', "\ufffd\ufeff"]


def test_texts_are_read_as_they_were_written(tmp_path):
    rows = [ROW, *((text, text, text) for text in TEXTS)]
    assert list(read_texts(write(tmp_path / "train.parquet", rows))) == rows
    path = write(tmp_path / "eval.parquet", [])
    assert list(read_texts(path)) == list(read_records(path, np.array([], np.int64))) == []


def test_kept_cells_are_read_where_they_are_asked_for(tmp_path):
    path = tmp_path / "train.parquet"
    with open_records(path, ["solution", "prompt"]) as append:
        append(make_record("p"), "7", '"p"')
        append(make_record(*ROW), "null", "[]")
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


@pytest.mark.parametrize(
    "rows",
    [
        # The last row of a row group and the first of the next.
        [0, ROWS_AT_A_TIME - 1, ROWS_AT_A_TIME - 1, ROWS_AT_A_TIME, ROWS_AT_A_TIME],
        # None of the second row group, and the only row of the third.
        [5, SEVERAL - 1],
    ],
)
def test_selected_rows_are_repeated_as_often_as_selected(tmp_path, rows):
    assert chosen_rows(numbered(tmp_path / "train.parquet", SEVERAL), rows) == rows


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
    texts = ["", "Why not?", "Why  not?", "why not?", "Why not", "为什么不呢?", "Why not?\0"]
    assert len({fingerprint(text) for text in texts}) == len(texts)


# --- ragged arrays ----------------------------------------------------------------------------


def write_ragged(folder, *pieces, vocab_size=300):
    with open_ragged(folder, "ids", vocab_size) as write_rows:
        for piece in pieces:
            write_rows(piece)
    return Ragged(folder, "ids")


def test_batches_are_read_as_one_array_of_views_that_cannot_be_written(tmp_path):
    pieces = [[[1, 2], []], [], [[3]], [[], []], [[4, 5, 6]]]
    ragged = write_ragged(tmp_path, *pieces)
    rows = [row for piece in pieces for row in piece]
    assert [ragged[row].tolist() for row in range(len(ragged))] == rows
    assert isinstance(ragged.ids, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        ragged[0][0] = 7


# From the first piece on the header would say 9 tokens; in the end the number has six digits.
@pytest.mark.parametrize("tokens", [0, 10, 123456])
def test_headers_have_the_number_of_tokens(tmp_path, tokens):
    write_ragged(tmp_path, [[7] * min(tokens, 9)], [[8] * (tokens - min(tokens, 9))])
    ids = np.load(tmp_path / "ids.ids.npy", allow_pickle=False)
    offsets = np.load(tmp_path / "ids.offsets.npy", allow_pickle=False)
    assert ids.tolist() == [7] * min(tokens, 9) + [8] * (tokens - min(tokens, 9))
    assert offsets.tolist() == [0, min(tokens, 9), tokens]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_ids_have_the_smallest_type_for_the_vocabulary(tmp_path, vocab_size, dtype):
    ragged = write_ragged(tmp_path, [[0, vocab_size - 1]], vocab_size=vocab_size)
    assert ragged.ids.dtype == dtype
    assert ragged[0].tolist() == [0, vocab_size - 1]


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
