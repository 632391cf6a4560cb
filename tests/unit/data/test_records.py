"""Reading and writing of records."""

import subprocess
import sys

import numpy as np
import pytest

from conftest import ROOT
from snakechat.data.records import (
    ROWS_AT_A_TIME,
    RecordWriter,
    kept_columns,
    read_record_batches,
    read_records,
    read_texts,
    texts_of,
)
from support.dialogues import make_record

ROW = ("\n\nHuman: Can you help?\n\nAssistant:", " Of course.", " No.")
# A row group and one row more than two of them.
SEVERAL = 2 * ROWS_AT_A_TIME + 1


def write(path, rows):
    with RecordWriter(path) as writer:
        for row in rows:
            writer.write(make_record(*row))
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
    with RecordWriter(path, ["solution", "prompt"]) as writer:
        writer.write(make_record("p"), "7", '"p"')
        writer.write(make_record(*ROW), "null", "[]")
    assert kept_columns(path) == ["solution", "prompt"]
    assert list(read_texts(path)) == [("p", None, None), ROW]
    [batch] = read_record_batches(path, columns=("prompt", "kept_solution"))
    question = [("user", "Can you help?")]
    assert batch == {"prompt": [[("unmarked", "p")], question], "kept_solution": ["7", "null"]}
    without = write(tmp_path / "without.parquet", [ROW])
    assert kept_columns(without) == []
    [batch] = read_record_batches(without, columns=("prompt", "kept_solution"))
    assert batch == {"prompt": [question]}


def test_batches_are_columns_of_the_same_rows(tmp_path):
    rows = [(f"p{i}", f"c{i}", None if i % 2 else f"r{i}") for i in range(SEVERAL)]
    batches = list(read_record_batches(write(tmp_path / "train.parquet", rows)))
    # No batch holds the whole file.
    assert len(batches) > 1
    assert all(list(batch) == ["prompt", "chosen", "rejected"] for batch in batches)
    found = [row for batch in batches for row in zip(*batch.values(), strict=True)]
    assert list(map(texts_of, found)) == rows


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


def test_the_same_records_give_the_same_bytes(tmp_path):
    first, second = (numbered(tmp_path / name, SEVERAL) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


# Writes and reads argv[2] rows of 500 characters each, and prints the peak memory in MB.
WRITE_AND_READ = """
import resource, sys
import numpy as np
sys.path.insert(0, "scripts")
from snakechat.data.records import RecordWriter, read_records

path, number = sys.argv[1], int(sys.argv[2])
with RecordWriter(path) as writer:
    for i in range(number):
        writer.write(([("user", f"{i:250d}")], f"{i:250d}", None))
for rows in (None, np.arange(number)):
    lengths = (len(prompt[0][1]) + len(chosen) for prompt, chosen, _ in read_records(path, rows))
    assert sum(lengths) == 500 * number
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
def test_memory_does_not_grow_with_the_number_of_rows(tmp_path):
    def peak(number):
        command = [sys.executable, "-c", WRITE_AND_READ, tmp_path / str(number), str(number)]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        return int(process.stdout)

    # The larger set's text alone is 50 MB.
    assert peak(100_000) - peak(10_000) < 30
