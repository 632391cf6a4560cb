"""Damaged source files: an error of one line with the file and the last valid row."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.files import as_arrow
from support.source_files import WRITERS, numbered, put, read_error, rows_before_damage, write


@pytest.mark.parametrize("name", WRITERS)
def test_empty_file_is_an_error(tmp_path, name):
    (tmp_path / name).touch()
    rows, _ = read_error(tmp_path / name)
    assert rows == []


def test_git_lfs_pointer_is_an_error_with_advice(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "version https://git-lfs.github.com/spec/v1\n"
        "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
        "size 132735538\n"
    )
    _, message = read_error(path)
    assert "git lfs pull" in message


@pytest.mark.parametrize("share", [0.01, 0.999])
def test_truncated_parquet_file_is_an_error(tmp_path, share):
    path = write(tmp_path, "rows.parquet", numbered(1000))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    # The positions of the rows are at the end of the file.
    assert rows_before_damage(path) == []


def test_damaged_parquet_pages_are_an_error(tmp_path):
    path = tmp_path / "rows.parquet"
    rows = numbered(1000)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=500)
    column = pq.ParquetFile(path).metadata.row_group(1).column(1)
    start = column.dictionary_page_offset or column.data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + 40] = bytes(40)
    path.write_bytes(content)
    # Only rows before the damaged page have been read.
    found = rows_before_damage(path)
    assert found == rows[: len(found)]
    assert len(found) <= 500


@pytest.mark.parametrize("missing", [1, 1000])
def test_truncated_gzip_is_an_error(tmp_path, missing):
    rows = numbered(1000)
    path = write(tmp_path, "rows.jsonl.gz", rows)
    path.write_bytes(path.read_bytes()[:-missing])
    found = rows_before_damage(path)
    assert found == rows[: len(found)]


@pytest.mark.parametrize("place", ["beginning", "middle", "check sum"])
def test_damaged_gzip_is_an_error(tmp_path, place):
    path = write(tmp_path, "rows.jsonl.gz", numbered(1000))
    content = bytearray(path.read_bytes())
    size = len(content)
    start = {"beginning": 0, "middle": size // 2, "check sum": size - 8}[place]
    content[start : start + 4] = b"\xff\x00\xff\x00"
    path.write_bytes(content)
    rows_before_damage(path)


def test_array_truncated_between_objects_is_an_error(tmp_path):
    rows = numbered(1000)
    content = json.dumps(rows).encode()
    start = content.index(b'{"prompt"', len(content) // 2)
    path = put(tmp_path / "rows.json", content[:start])
    assert rows_before_damage(path) == rows[: content[:start].count(b"{")]


@pytest.mark.parametrize(
    "end",
    [
        *(b"", b",]", b', {"a": 2', b", {'a': 2}]", b', {"a": 2} {"a": 3}]'),
        *(b', {"a": ' + b"9" * 5000 + b"}]", b"] x"),
    ],
)
def test_invalid_array_is_an_error(tmp_path, end):
    # Nothing tells where the next item starts.
    found = rows_before_damage(put(tmp_path / "rows.json", b'[{"a": 1},{"a": 2}' + end))
    assert found[:1] == [{"a": 1}]


def write_truncated_arrow(path, where):
    """Write an arrow file of ten batches of ten rows, truncated within the sixth batch."""
    table = pa.Table.from_pylist(numbered(100))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        for start in range(0, 100, 10):
            stream.write_table(table.slice(start, 10))
            if start == 40:
                end = file.tell()
    path.write_bytes(path.read_bytes()[: end + where])


@pytest.mark.parametrize("where", [4, 200])
def test_truncated_arrow_is_an_error(tmp_path, where):
    path = tmp_path / "rows.arrow"
    write_truncated_arrow(path, where)
    assert rows_before_damage(path) == numbered(50)


def test_damaged_arrow_is_an_error(tmp_path):
    # Zeros in the offsets of the only column.
    path = tmp_path / "rows.arrow"
    content = bytearray(as_arrow([{"a": f"text {number}"} for number in range(100)]))
    # The texts have 6 characters up to number 9, then 7: the eleventh begins at 60, then 67, 74.
    start = content.index(b"".join(n.to_bytes(4, "little") for n in (60, 67, 74)))
    content[start : start + 40] = bytes(40)
    path.write_bytes(content)
    read_error(path)


@pytest.mark.parametrize("row", [1, 3])
def test_unclosed_quote_in_csv_is_an_error(tmp_path, row):
    lines = ["p,q", *["1,2"] * (row - 1), '"3,4', "5,6", ""]
    path = put(tmp_path / "rows.csv", "\n".join(lines).encode())
    assert rows_before_damage(path) == [{"p": "1", "q": "2"}] * (row - 1)
