"""Bounds of rows: what exceeds them is a bad row, and the rows after it are read."""

import faulthandler
import gzip
import io
import json
import os
import resource
import signal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snakechat.data import json_rows, reading_process, row_bounds, table_rows
from snakechat.data.formats import BadRow, columns_of, kept_cells, record_of
from snakechat.data.reading_process import read_in_child
from snakechat.data.sources import count_rows, read_rows
from snakechat.workflow.errors import InputError
from support.source_files import JSON, WRITERS, put, read, read_error, write

GOOD = {"prompt": "a", "chosen": "b"}
GOOD_JSON = json.dumps(GOOD).encode()
LIMIT = 100_000


@pytest.fixture
def low_limit(monkeypatch):
    """A limit for rows of 100 kB, so that files stay small."""
    for name in ("row_bounds", "json_rows", "csv_rows", "table_rows"):
        monkeypatch.setattr(f"snakechat.data.{name}.MAX_ROW_BYTES", LIMIT)
    monkeypatch.setattr(json_rows, "CHUNK", 10_000)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("size", [LIMIT // 2, 2 * LIMIT, 20 * LIMIT])
def test_row_over_the_limit_is_a_bad_row(tmp_path, low_limit, name, size):
    # With characters that csv and json escape.
    text = '\\"x\n'
    long = {"prompt": "a", "chosen": text * (size // len(text))}
    first, second, third = read(write(tmp_path, name, [GOOD, long, GOOD]))
    assert first == third == GOOD
    if size < LIMIT:
        assert second == long
    else:
        assert second.startswith("bad: longer than 100,000 bytes")


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize("depth", [99, 100, 101, 5_000, 200_000])
def test_row_with_many_levels_is_a_bad_row(tmp_path, name, depth):
    row = b'{"a": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
    lines = [GOOD_JSON, row, GOOD_JSON]
    content = b"[" + b",".join(lines) + b"]" if name == "rows.json" else b"\n".join(lines)
    first, second, third = read(put(tmp_path / name, content))
    assert first == third == GOOD
    assert second == json.loads(row) if depth <= 100 else second.startswith("bad: nested deeper")


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


def test_lines_of_a_decompression_bomb_are_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("snakechat.data.sources.COUNTED_BYTES", 1 << 20)
    assert count_rows(put(tmp_path / "rows.jsonl.gz", b"\n" * (1 << 21))) is None


def repeated_text(path, size, rows):
    """Write a table with one text in all rows: the file has it once, in a dictionary."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * size]))
    pq.write_table(pa.table({"prompt": texts}), path, compression="zstd")
    return path


def test_table_that_decodes_to_gigabytes_is_an_error(tmp_path):
    path = repeated_text(tmp_path / "rows.parquet", 20_000_000, 250)
    assert path.stat().st_size < 10_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows, message = read_error(path)
    assert all(isinstance(row, BadRow) for row in rows)
    assert "decompression bomb" in message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


def test_batches_have_fewer_rows_if_a_dictionary_has_long_texts(tmp_path):
    path = repeated_text(tmp_path / "rows.parquet", 8_000_000, 20)
    file = pq.ParquetFile(path)
    assert table_rows._rows_per_batch(path, file.metadata, ["prompt"]) == 8
    assert [len(row["prompt"]) for row in read(path)] == [8_000_000] * 20


NUMBERS = [10**400, "1" * 400, float("nan"), float("inf"), "-inf", "1e999"]


@pytest.mark.parametrize("score", NUMBERS, ids=lambda score: f"{score}"[:8])
def test_score_that_is_not_finite_is_a_bad_row(score):
    row = {"prompt": "a", "first": "b", "second": "c", "first_score": score, "second_score": 1}
    with pytest.raises(BadRow, match=r"first_score is .*, expected a finite number"):
        record_of(row, "scored", columns_of("scored"))


def test_numbers_of_an_array_can_be_kept(tmp_path):
    [row] = read(put(tmp_path / "rows.json", b'[{"a": 0.5}]'))
    assert kept_cells(row, ["a"]) == ["0.5"]


@pytest.mark.parametrize("format", ["vicuna", "plain", "instruct"])
def test_long_white_space_takes_linear_time(format):
    text = "a" + " \n" * 500_000 + "b USER: c"
    record_of(
        {name: text for name in ("prompt", "chosen", "rejected", "label")},
        format,
        columns_of(format),
    )


def test_reason_of_a_bad_row_is_short_and_printable():
    with pytest.raises(BadRow) as error:
        record_of({"\x1b[31m" + "k" * 5_000_000: 1}, "plain", columns_of("plain"))
    assert len(str(error.value)) < 1000 and str(error.value).isprintable()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(JSON_VALUES), st.integers(1, 40), st.booleans(), st.sampled_from([None, 1]))
def test_array_has_the_items_of_a_json_parser(items, chunk, ascii_only, indent):
    text = json.dumps(items, ensure_ascii=ascii_only, indent=indent)
    with pytest.MonkeyPatch.context() as patch:
        # Chunks end within texts, escapes and numbers.
        patch.setattr(json_rows, "CHUNK", chunk)
        assert list(json_rows._Array(io.StringIO(text, newline=""))) == items


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
    assert row_bounds.MAX_ROW_BYTES == 16 << 20


def test_row_numbers_stay_right_after_a_bad_row(tmp_path, low_limit):
    path = put(tmp_path / "rows.jsonl", GOOD_JSON + b"\n" + b"x" * 3 * LIMIT + b"\n" + GOOD_JSON)
    assert [number for number, _ in read_rows(path)] == [1, 2, 3]
