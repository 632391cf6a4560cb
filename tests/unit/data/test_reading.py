"""Bounds of rows, and of the memory that reading them takes."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from import_dataset import record_and_cells
from snakechat.data import text_rows
from snakechat.data.cells import BadRow
from snakechat.data.formats import columns_of, record_of
from snakechat.data.memory_limit import limited_memory
from snakechat.data.sources import read_rows
from support.source_files import put, read, rows_before_damage, write

GOOD = {"prompt": "a", "chosen": "b"}


def test_items_may_end_anywhere_in_a_chunk(tmp_path, monkeypatch):
    items = [{"a": 'x\\"]},[{'}, {"b": [1.5, {"c": None}]}, {}]
    path = put(tmp_path / "rows.json", json.dumps(items, indent=1).encode())
    for chunk in range(2, 40):
        monkeypatch.setattr(text_rows, "CHUNK", chunk)
        assert read(path) == items


@pytest.mark.parametrize("name", ["rows.json", "rows.csv"])
def test_text_whose_end_is_unknown_is_an_error(tmp_path, monkeypatch, name):
    monkeypatch.setattr(text_rows, "CHUNK", 20_000)
    monkeypatch.setattr(text_rows, "MAX_ITEM", 400_000)
    monkeypatch.setattr(text_rows, "MAX_CELL", 400_000)
    # A cell of csv that Python's own limit would reject, and one over ours.
    short, long = ({**GOOD, "chosen": 'x"\n' * number} for number in (50_000, 200_000))
    assert read(write(tmp_path, name, [GOOD, short, GOOD])) == [GOOD, short, GOOD]
    assert rows_before_damage(write(tmp_path, name, [GOOD, long, GOOD])) == [GOOD]


def bomb_of_text(path):
    """Write a compressed file with one line of 300 MB."""
    path.write_bytes(gzip.compress(b"x" * 300_000_000, 1))


def bomb_of_a_table(path):
    """Write a table with one text in all rows: the file has it once, in a dictionary."""
    rows = pa.array([0] * 250, pa.int32())
    texts = pa.DictionaryArray.from_arrays(rows, pa.array(["x" * 5_000_000]))
    pq.write_table(pa.table({"prompt": texts}), path, compression="zstd")


@pytest.mark.parametrize(
    ("name", "make"), [("rows.jsonl.gz", bomb_of_text), ("rows.parquet", bomb_of_a_table)]
)
def test_decompression_bomb_is_an_error(tmp_path, name, make):
    path = tmp_path / name
    make(path)
    with pytest.raises(MemoryError), limited_memory(200 << 20):
        sum(1 for _ in read_rows(path))


# 100 rows of 20,000 characters; a hundred times as many make 200 MB.
LARGE = [{**GOOD, "prompt": "x" * 20_000}] * 100


def large_array(path):
    with path.open("w") as file:
        file.write("[")
        file.writelines([json.dumps(LARGE)[1:-1] + ","] * 100)
        file.write(json.dumps(GOOD) + "]")


def large_table(path):
    """Write one row group."""
    table = pa.concat_tables([pa.Table.from_pylist(LARGE)] * 100 + [pa.Table.from_pylist([GOOD])])
    pq.write_table(table, path, use_dictionary=False, compression="none")


@pytest.mark.parametrize(("kind", "make"), [("json", large_array), ("parquet", large_table)])
def test_a_file_is_read_in_less_memory_than_its_size(tmp_path, kind, make):
    path = tmp_path / f"rows.{kind}"
    make(path)
    assert path.stat().st_size > 200_000_000
    with limited_memory(150 << 20):
        assert sum(1 for _ in read_rows(path)) == 10_001
    # pytest keeps its folders of several runs.
    path.unlink()


NESTED = []
for _ in range(100_000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("row", "keep", "reason"),
    [
        ({"prompt": "a\udce9", "chosen": "b"}, (), r"text that is not UTF-8: '\udce9': save"),
        # Half of an emoji.
        ({"prompt": "a", "chosen": "b\ud83d"}, (), r"text that is not UTF-8: '\ud83d'"),
        ({**GOOD, "x": {"\udce9": 1}}, ("x",), r"text that is not UTF-8: '\udce9"),
        ({**GOOD, "x": NESTED}, ("x",), "nested too deeply"),
    ],
)
def test_cell_that_records_cannot_have_makes_a_row_a_bad_one(row, keep, reason):
    columns = columns_of("plain", {"prompt": "prompt", "chosen": "chosen"})
    with pytest.raises(BadRow) as error:
        record_and_cells(row, "plain", columns, keep)
    assert str(error.value).startswith(reason)
    # A column that nothing uses does no harm.
    if keep:
        assert record_and_cells(row, "plain", columns, ())[1] == []


@pytest.mark.parametrize("format", ["vicuna", "plain"])
def test_long_white_space_takes_linear_time(format):
    text = "a" + " \n" * 500_000 + "b USER: c"
    row = dict.fromkeys(("prompt", "chosen", "rejected", "label"), text)
    record_of(row, format, columns_of(format))
