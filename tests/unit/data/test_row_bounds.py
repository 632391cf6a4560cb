"""Rows that exceed bounds are bad ones or end the import; the process that reads is limited."""

import faulthandler
import gzip
import json
import os
import resource
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from import_dataset import record_and_cells
from snakechat.data import json_rows, reading_process
from snakechat.data.cells import BadRow
from snakechat.data.formats import columns_of, record_of
from snakechat.data.reading_process import read_in_child
from snakechat.data.sources import read_rows
from snakechat.workflow.errors import InputError
from support.source_files import put, read, rows_before_damage, write

GOOD = {"prompt": "a", "chosen": "b"}
GOOD_JSON = json.dumps(GOOD).encode()
LIMIT = 100_000
DEEP = b"[" * 200_000 + b"]" * 200_000


@pytest.fixture
def low_limit(monkeypatch):
    """A limit for rows of 100 kB, so that files stay small."""
    for name in ("row_bounds", "json_rows", "csv_rows", "table_rows"):
        monkeypatch.setattr(f"snakechat.data.{name}.MAX_ROW_BYTES", LIMIT)
    monkeypatch.setattr(json_rows, "CHUNK", 10_000)


def long_row(size):
    """Return a row of many bytes, with characters that csv and json escape."""
    text = '\\"x\n'
    return {"prompt": "a", "chosen": text * (size // len(text))}


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_row_over_the_limit_is_a_bad_row(tmp_path, low_limit, name):
    long = long_row(LIMIT // 2)
    assert read(write(tmp_path, name, [GOOD, long, GOOD])) == [GOOD, long, GOOD]
    first, second, third = read(write(tmp_path, name, [GOOD, long_row(20 * LIMIT), GOOD]))
    assert first == third == GOOD
    assert second.startswith("bad: longer than 100,000 bytes")


@pytest.mark.parametrize("name", ["rows.json", "rows.csv"])
def test_row_over_the_limit_whose_end_is_unknown_is_an_error(tmp_path, low_limit, name):
    long = long_row(LIMIT // 2)
    assert read(write(tmp_path, name, [GOOD, long, GOOD])) == [GOOD, long, GOOD]
    assert rows_before_damage(write(tmp_path, name, [GOOD, long_row(20 * LIMIT), GOOD])) == [GOOD]


def test_line_with_many_levels_is_a_bad_row(tmp_path):
    path = put(tmp_path / "rows.jsonl", b"\n".join([GOOD_JSON, b'{"a": %b}' % DEEP, GOOD_JSON]))
    assert read(path) == [GOOD, "bad: nested too deeply", GOOD]


def test_items_may_end_anywhere_in_a_chunk(tmp_path, monkeypatch):
    items = [{"a": 'x\\"]},[{'}, {"b": [1.5, {"c": None}]}, {}]
    for chunk in range(2, 40):
        monkeypatch.setattr(json_rows, "CHUNK", chunk)
        for indent in (None, 1):
            content = json.dumps(items, indent=indent).encode()
            assert read(put(tmp_path / "rows.json", content)) == items


def test_line_of_a_decompression_bomb_is_a_bad_row(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(b'{"a": "')
        for _ in range(200):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n{"a": 1}\n')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first, second = read(path)
    assert first.startswith("bad: longer than") and second == {"a": 1}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def repeated_text(path, size, rows):
    """Write a table with one text in all rows: the file has it once, in a dictionary."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * size]))
    pq.write_table(pa.table({"prompt": texts}), path, compression="zstd")
    return path


def number_of_rows(path):
    """Read a file in the process that imports use; return its number of rows."""
    return read_in_child([path], lambda position: sum(1 for _ in read_rows(path)))


def test_table_that_decodes_to_gigabytes_is_an_error(tmp_path, monkeypatch):
    path = repeated_text(tmp_path / "rows.parquet", 20_000_000, 250)
    assert path.stat().st_size < 10_000
    with pytest.raises(InputError, match="after row 0 take too much memory"):
        number_of_rows(path)
    # Few enough in memory, but too many in total.
    monkeypatch.setattr("snakechat.data.table_rows.MAX_DECODED_BYTES", 100 << 20)
    path = repeated_text(path, 1_000_000, 1000)
    with pytest.raises(InputError, match="after row 64 take too much memory"):
        number_of_rows(path)


def nested(depth):
    """Return lists in lists."""
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("row", "keep", "reason"),
    [
        ({"prompt": "a\udce9", "chosen": "b"}, (), r"text that is not UTF-8: '\udce9'"),
        (
            {"prompt": "a", "chosen": "\udcb5\udcda"},
            (),
            r"text that is not UTF-8: '\udcb5\udcda': save",
        ),
        # Half of an emoji.
        ({"prompt": "a", "chosen": "b\ud83d"}, (), r"text that is not UTF-8: '\ud83d'"),
        ({**GOOD, "x": {"\udce9": 1}}, ("x",), r"text that is not UTF-8: '\udce9"),
        ({**GOOD, "x": nested(100_000)}, ("x",), "nested too deeply"),
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
    record_of(
        {name: text for name in ("prompt", "chosen", "rejected", "label")},
        format,
        columns_of(format),
    )


# --- the process that reads -----------------------------------------------------------------


def test_result_and_errors_of_the_process_that_reads(tmp_path):
    path = tmp_path / "rows.jsonl"

    def fail(error):
        raise error

    assert read_in_child([path], lambda position: [1, {"a": "é"}]) == [1, {"a": "é"}]
    with pytest.raises(InputError, match=r"^bad$"):
        read_in_child([path], lambda position: fail(InputError("bad")))
    with pytest.raises(OSError, match="full: 'x'") as error:
        read_in_child([path], lambda position: fail(OSError(28, "full", "x")))
    assert error.value.errno == 28
    # The child has printed its traceback.
    with pytest.raises(SystemExit):
        read_in_child([path], lambda position: fail(AssertionError()))


def test_crash_of_the_process_that_reads_names_file_and_row(tmp_path):
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]

    def crash(position):
        # pytest's, which prints a report.
        faulthandler.disable()
        position.set(1, 7)
        os.kill(os.getpid(), signal.SIGSEGV)

    with pytest.raises(InputError) as error:
        read_in_child(paths, crash)
    assert str(error.value).startswith(f"{paths[1]}: after row 7: ")
    assert "SIGSEGV" in str(error.value)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_process_that_reads_has_limited_memory(tmp_path):
    with pytest.raises(InputError, match="after row 0: the next rows take more than 800 MiB"):
        read_in_child([tmp_path / "rows.csv"], lambda position: len(bytearray(2 * 800 << 20)))
    assert reading_process.MAX_MEMORY_BYTES == 800 << 20
