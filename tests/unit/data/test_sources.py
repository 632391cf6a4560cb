"""Rows of source files of every kind, valid and damaged."""

import gzip
import json
import re
import subprocess
import sys
from datetime import date
from decimal import Decimal
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import ROOT
from snakechat.data.dataset_files import local_paths, split_files
from snakechat.data.formats import BadRow
from snakechat.data.sources import count_rows, read_rows
from snakechat.workflow.errors import InputError
from support.files import as_arrow, as_csv, as_gz, as_json, as_jsonl, as_parquet

SCRIPTS = ROOT / "scripts"


# Most tools do not escape texts.
PLAIN = {"ensure_ascii": False}
WRITERS = {
    "rows.parquet": as_parquet,
    "rows.arrow": partial(as_arrow, batch=100),
    "rows.jsonl": partial(as_jsonl, **PLAIN),
    "rows.jsonl.gz": partial(as_gz, **PLAIN),
    "rows.json": partial(as_json, indent=1, **PLAIN),
    # One object per line in a file named .json.
    "lines.json": partial(as_jsonl, **PLAIN),
    "rows.csv": as_csv,
}
NESTING = [name for name in WRITERS if name != "rows.csv"]
JSON = ["rows.jsonl", "rows.jsonl.gz", "rows.json", "lines.json"]
ROW = {"prompt": "\n\nHuman: Can you help?\n\nAssistant:", "chosen": " Of course, I can."}


def numbered(number):
    return [{**ROW, "chosen": f" Response {n}."} for n in range(number)]


def write(folder, name, rows):
    (folder / name).write_bytes(WRITERS[name](rows))
    return folder / name


def put(path, content):
    """Write bytes into a file, compressed if its name ends in .gz."""
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read(path):
    """Return all rows of a file, numbered from 1; a bad row as "bad: reason"."""
    numbers, rows = zip(*read_rows(path), strict=True)
    assert list(numbers) == list(range(1, len(rows) + 1))
    return [f"bad: {row}" if isinstance(row, BadRow) else row for row in rows]


def read_error(path):
    """Return the rows before an error, and its message."""
    rows = []
    with pytest.raises(InputError) as error:
        rows.extend(row for _, row in read_rows(path))
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return rows, message


def rows_before_damage(path):
    """Return the rows before damage; the error has their number and the size of the file."""
    rows, message = read_error(path)
    assert f"damaged or truncated after row {len(rows)} ({path.stat().st_size} bytes): " in message
    return rows


# --- valid files ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("number", [1, 255, 256, 257, 1000])
def test_every_kind_gives_the_same_rows(tmp_path, name, number):
    rows = numbered(number)
    assert read(write(tmp_path, name, rows)) == rows


TEXTS = {
    "empty": "",
    "blank": " ",
    "paragraphs": "a\n\nb\n",
    "line breaks of other systems": "a\r\nb\rc",
    "line breaks of Unicode": "a\u2028b\u2029c\x85d\x0be\x0cf",
    "quotes and commas": 'He said, "no, ""never""", and \'yes\'; \\n \\',
    "NUL and other control characters": "a\x00b\x01\x1b[0m\x7f",
    "Chinese": "天空为什么是蓝色的。",
    "emoji": "😀 \U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "joined and composed": "\xe9 e\u0301 नि",
    "byte order marks and invisible characters": "\ufeffa\ufffd\u200bb\ufeff",
    "digits": "007",
    "null in words": "null",
    "dates": "2020-01-01T00:00:00",
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_texts_are_exact(tmp_path, name, text):
    rows = [{**ROW, "chosen": text}, ROW, {**ROW, "prompt": text}]
    assert read(write(tmp_path, name, rows)) == rows


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_escaped_json_texts_are_exact(tmp_path, name, text):
    rows = [{**ROW, "chosen": text}] * 2
    content = json.dumps(rows)
    if name != "rows.json":
        content = "\n".join(map(json.dumps, rows))
    assert content.isascii()
    assert read(put(tmp_path / name, content.encode())) == rows


@pytest.mark.parametrize("name", WRITERS)
def test_rows_of_three_megabytes_are_read(tmp_path, name):
    # Quotes, so that csv and json have something to undo.
    rows = [ROW, {**ROW, "chosen": 'x"' * 1_500_000}, ROW]
    assert read(write(tmp_path, name, rows)) == rows


@pytest.mark.parametrize("name", NESTING)
def test_lists_and_structs_are_read(tmp_path, name):
    rows = [
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "answers": {"ja": ["一", "二"], "en": []},
            "score": 0.5,
            "label": True,
            "count": -3,
            "nothing": None,
        },
        {
            "messages": [],
            "answers": {"ja": None, "en": ["x"]},
            "score": -0.25,
            "label": False,
            "count": 2**62,
            "nothing": None,
        },
    ]
    found = read(write(tmp_path, name, rows))
    assert found == rows
    assert [type(value) for value in found[0].values()] == [
        list,
        dict,
        # Exact in an array, where whole numbers may be of any size.
        Decimal if name == "rows.json" else float,
        bool,
        int,
        type(None),
    ]


@pytest.mark.parametrize("name", JSON)
def test_numbers_of_any_size_are_read(tmp_path, name):
    # Digests and ids without a sign are larger than 63 bits.
    rows = [{**ROW, "id": 2**64 - 1}, {**ROW, "id": 10**30}]
    assert read(write(tmp_path, name, rows)) == rows


@pytest.mark.parametrize("name", WRITERS)
def test_names_as_wget_leaves_them_are_read(tmp_path, name):
    path = write(tmp_path, name, [ROW])
    assert read(path.rename(f"{path}?download=true")) == [ROW]


@pytest.mark.parametrize("name", WRITERS)
def test_equals_sign_in_a_path_is_not_a_partition(tmp_path, name):
    folder = tmp_path / "lang=en"
    folder.mkdir()
    assert read(write(folder, name, [ROW])) == [ROW]


@pytest.mark.parametrize("name", [*JSON, "rows.csv"])
def test_byte_order_mark_is_skipped(tmp_path, name):
    path = write(tmp_path, name, [ROW, ROW])
    content = path.read_bytes()
    if name == "rows.jsonl.gz":
        content = gzip.decompress(content)
    assert read(put(path, b"\xef\xbb\xbf" + content)) == [ROW, ROW]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "lines.json"])
def test_empty_lines_are_skipped(tmp_path, name):
    content = b'{"a": 1}\n\n  \n{"a": 2}\r\n\r\n\t\n{"a": 3}'
    found = list(read_rows(put(tmp_path / name, content)))
    # Numbers are those of lines, as an editor shows them.
    assert found == [(1, {"a": 1}), (4, {"a": 2}), (7, {"a": 3})]


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize("space", [b"\n", b"\r\n\r\n", b"  \n\t"])
def test_whitespace_before_the_first_object_is_skipped(tmp_path, name, space):
    content = b'[{"a": 1}]' if name == "rows.json" else b'{"a": 1}\n'
    found = list(read_rows(put(tmp_path / name, space + content)))
    assert [row for _, row in found] == [{"a": 1}]


def test_concatenated_gzip_members_are_read(tmp_path):
    # As cat a.gz b.gz makes them.
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(b"".join(gzip.compress(b'{"a": %d}\n' % n) for n in (1, 2)))
    assert read(path) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_csv_with_any_line_ends(tmp_path, end):
    text = end.join(["a,b", '"1, ""2""\nx",', "", "3,4", ""])
    path = put(tmp_path / "rows.csv", text.encode())
    assert read(path) == [{"a": '1, "2"\nx', "b": ""}, {"a": "3", "b": "4"}]


def test_json_lines_without_a_final_newline(tmp_path):
    assert read(put(tmp_path / "rows.jsonl", b'{"a": 1}\n{"a": 2}')) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("name", JSON)
def test_objects_may_differ_in_their_columns(tmp_path, name):
    rows = [{"a": "x"}, {"b": ["y"]}, {}]
    assert read(write(tmp_path, name, rows)) == rows


@pytest.fixture
def datasets():
    """The datasets library, which writes arrow."""
    return pytest.importorskip("datasets")


def rows_of_splits(folder):
    return {
        split: [row for path in paths for row in read(folder / path)]
        for split, paths in split_files(local_paths(folder), {}).items()
    }


CONVERSATION = {"messages": [{"role": "user", "content": "你好"}], "source": None}


def test_a_dataset_that_was_saved_to_disk_is_read(tmp_path, datasets):
    rows = [{**row, **CONVERSATION} for row in numbered(700)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "mine", num_shards=2)
    # map() leaves caches next to the rows.
    loaded = datasets.load_from_disk(tmp_path / "mine")
    loaded.map(lambda row: {"chosen": "mapped"})
    assert list((tmp_path / "mine").glob("cache-*.arrow"))
    assert rows_of_splits(tmp_path / "mine") == {"train": rows}


def test_a_dict_of_datasets_that_was_saved_to_disk_is_read(tmp_path, datasets):
    train, test = numbered(3), [{**ROW, "chosen": " Held out."}]
    splits = {"train": train, "test": test}
    splits = {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "mine")
    assert rows_of_splits(tmp_path / "mine") == {"train": train, "eval": test}


# --- bad rows: a BadRow in place of the row -------------------------------------------------


# Lines, and the start of the reason.
BAD_LINES = {
    "single quotes": (b"{'a': 1}", "invalid JSON"),
    "truncated": (b'{"a": 1', "invalid JSON"),
    "two objects": (b'{"a": 1} {"a": 2}', "invalid JSON"),
    "a page": (b"<html>", "invalid JSON"),
    "NUL": (b"\x00", "invalid JSON"),
    "more digits than Python takes": (b'{"a": ' + b"9" * 5000 + b"}", "invalid JSON"),
    "more brackets than Python takes": (b"[" * 100_000, ""),
    "a list": (b'[{"a": 1}]', "is list, expected an object with columns"),
    "a text": (b'"a"', "is str, expected an object with columns"),
    "a number": (b"7", "is int, expected an object with columns"),
    "nothing": (b"null", "is NoneType, expected an object with columns"),
    "Latin-1": (b'{"a": "caf\xe9"}', "text that is not UTF-8"),
    "Latin-1 in a column's name": (b'{"caf\xe9": "a"}', "text that is not UTF-8"),
    # A text truncated within an emoji: records cannot hold it.
    "first half of an emoji": (b'{"a": "\\ud83d"}', ""),
    "second half of an emoji in a list": (b'{"a": [{"b": "x\\ude00"}]}', ""),
    "half an emoji in a column's name": (b'{"\\ud83d": "a"}', ""),
}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "lines.json"])
@pytest.mark.parametrize("line", BAD_LINES)
def test_invalid_line_is_a_bad_row(tmp_path, name, line):
    content, reason = BAD_LINES[line]
    path = put(tmp_path / name, b'{"a": 1}\n' + content + b'\n{"a": 3}\n')
    first, second, third = read(path)
    assert (first, third) == ({"a": 1}, {"a": 3})
    assert second.startswith(f"bad: {reason}")
    assert "\n" not in second


def test_truncated_last_line_is_a_bad_row(tmp_path):
    path = write(tmp_path, "rows.jsonl", [ROW, ROW])
    path.write_bytes(path.read_bytes()[:-10])
    first, second = read(path)
    assert first == ROW
    assert second.startswith("bad: invalid JSON")


def test_array_items_that_are_not_objects_are_bad_rows(tmp_path):
    path = put(tmp_path / "rows.json", b'[{"a": 1}, 7, "a", null, [{"a": 1}], {"a": 6}]')
    kinds = ("int", "str", "NoneType", "list")
    bad = [f"bad: is {kind}, expected an object with columns" for kind in kinds]
    assert read(path) == [{"a": 1}, *bad, {"a": 6}]


def test_half_a_surrogate_pair_in_an_array(tmp_path):
    path = put(tmp_path / "rows.json", b'[{"a": 1}, {"a": "x\\ude00"}]')
    assert rows_before_damage(path) == [{"a": 1}]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("a", "1 cells, the header has 2 columns"),
        ("a,b,c", "3 cells, the header has 2 columns"),
        ("a,b,", "3 cells, the header has 2 columns"),
        ("a,caf\xe9", "text that is not UTF-8"),
        ('"a\n\xe9",b', "text that is not UTF-8"),
    ],
)
def test_invalid_csv_row_is_a_bad_row(tmp_path, line, reason):
    content = 'p,q\n"1\n1",é\n'.encode() + line.encode("latin-1") + b"\n3,4\n"
    first, second, third = read(put(tmp_path / "rows.csv", content))
    assert (first, third) == ({"p": "1\n1", "q": "é"}, {"p": "3", "q": "4"})
    assert second.startswith(f"bad: {reason}")


def latin(rows, bad):
    """Return a table with some texts in Latin-1, which parquet and arrow do not check."""
    cells = [b"caf\xe9" if number in bad else text.encode() for number, text in enumerate(rows)]
    cells = pa.array(cells, pa.binary())
    texts = pa.Array.from_buffers(pa.string(), len(cells), cells.buffers())
    lists = pa.ListArray.from_arrays(pa.array(range(len(rows) + 1), pa.int32()), texts)
    return {"text": pa.table({"a": texts}), "list": pa.table({"a": lists})}


@pytest.mark.parametrize("where", ["text", "list"])
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_rows_that_are_not_utf_8_are_bad_rows(tmp_path, kind, where):
    texts, bad = [f"é{number}" for number in range(600)], {0, 299, 300, 599}
    table, path = latin(texts, bad)[where], tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    found = read(path)
    assert len(found) == 600
    for number, row in enumerate(found):
        if number in bad:
            assert row.startswith("bad: text that is not UTF-8")
        else:
            assert row == {"a": texts[number] if where == "text" else [texts[number]]}


def test_date_outside_of_pythons_range_is_a_bad_row(tmp_path):
    # Columns that nobody asks for must not stop an import.
    days = pa.array([1, 10**8, 3], pa.date32())
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "day": days}), path)
    first, _, third = read(path)
    assert first == {"prompt": "a", "day": date(1970, 1, 2)}
    assert third == {"prompt": "c", "day": date(1970, 1, 4)}


WITHOUT_PANDAS = """
import sys
class Finder:
    def find_spec(self, name, *_):
        if name == "pandas":
            raise ImportError(name)
sys.meta_path.insert(0, Finder())
sys.path.insert(0, sys.argv[1])
from snakechat.data.sources import read_rows
for number, row in read_rows(sys.argv[2], ["prompt"]):
    print(number, row["prompt"])
"""


def test_nanoseconds_are_read_without_pandas(tmp_path):
    # As pandas writes times; it is not among the requirements.
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "at": pa.array([1], pa.timestamp("ns"))}), path)
    command = [sys.executable, "-c", WITHOUT_PANDAS, SCRIPTS, path]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.stdout == "1 a\n", process.stderr


# --- damaged files: an error of one line with the file and the last valid row --------------


@pytest.mark.parametrize("name", WRITERS)
def test_empty_file_is_an_error(tmp_path, name):
    (tmp_path / name).touch()
    rows, _ = read_error(tmp_path / name)
    assert rows == []


WITHOUT_ROWS = {
    "rows.jsonl": b"\n \n",
    "rows.jsonl.gz": b"",
    "rows.json": b" [ ] \n",
    "lines.json": b"[]",
    "rows.csv": b"prompt,chosen\n",
}


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_file_without_rows_is_an_error(tmp_path, name):
    path = put(tmp_path / name, WITHOUT_ROWS[name])
    assert read_error(path) == ([], f"{path}: no rows")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_table_without_rows_is_an_error(tmp_path, kind):
    table, path = pa.Table.from_pylist([ROW]).slice(0, 0), tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    assert read_error(path) == ([], f"{path}: no rows")


@pytest.mark.parametrize("name", WRITERS)
def test_git_lfs_pointer_is_an_error_with_advice(tmp_path, name):
    (tmp_path / name).write_text(
        "version https://git-lfs.github.com/spec/v1\n"
        "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
        "size 132735538\n"
    )
    _, message = read_error(tmp_path / name)
    assert "git lfs pull" in message


@pytest.mark.parametrize("name", ["rows.txt", "rows", "rows.parquet.lock"])
def test_unknown_kind_of_file_is_an_error(tmp_path, name):
    (tmp_path / name).write_text('{"a": 1}\n')
    read_error(tmp_path / name)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.jsonl.gz", "rows.json"])
def test_html_page_instead_of_a_file_is_an_error(tmp_path, name):
    (tmp_path / name).write_text("<html>\n<body>401: log in first</body>\n</html>\n")
    read_error(tmp_path / name)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.999])
def test_truncated_parquet_file_is_an_error(tmp_path, share):
    path = write(tmp_path, "rows.parquet", numbered(1000))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    # The positions of the rows are at the end of the file.
    assert rows_before_damage(path) == []


@pytest.mark.parametrize("missing", [1, 4, 8, 100])
def test_parquet_file_without_its_last_bytes_is_an_error(tmp_path, missing):
    path = write(tmp_path, "rows.parquet", numbered(1000))
    path.write_bytes(path.read_bytes()[:-missing])
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


def damage_footer(path):
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[-8:-4], "little")
    content[-8 - size : -8 - size + 30] = bytes(30)
    path.write_bytes(content)


def test_damaged_parquet_footer_is_an_error(tmp_path):
    path = write(tmp_path, "rows.parquet", numbered(10))
    damage_footer(path)
    assert rows_before_damage(path) == []


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_truncated_gzip_is_an_error(tmp_path, share):
    path, rows = tmp_path / "rows.jsonl.gz", numbered(1000)
    path.write_bytes(as_gz(rows))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    found = rows_before_damage(path)
    assert found == rows[: len(found)]
    assert len(found) < 1000


@pytest.mark.parametrize("missing", [1, 8])
def test_gzip_without_its_last_bytes_is_an_error(tmp_path, missing):
    path = write(tmp_path, "rows.jsonl.gz", numbered(10))
    path.write_bytes(path.read_bytes()[:-missing])
    rows_before_damage(path)


@pytest.mark.parametrize("place", ["beginning", "middle", "check sum"])
def test_damaged_gzip_is_an_error(tmp_path, place):
    path = write(tmp_path, "rows.jsonl.gz", numbered(1000))
    content = bytearray(path.read_bytes())
    size = len(content)
    start = {"beginning": 0, "middle": size // 2, "check sum": size - 8}[place]
    content[start : start + 4] = b"\xff\x00\xff\x00"
    path.write_bytes(content)
    rows_before_damage(path)


def test_uncompressed_lines_named_gz_are_an_error(tmp_path):
    # As a browser leaves them, which has unpacked them on the way.
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(as_jsonl([ROW]))
    assert rows_before_damage(path) == []


def test_array_truncated_between_objects_is_an_error(tmp_path):
    rows = numbered(1000)
    content = json.dumps(rows).encode()
    start = content.index(b'{"prompt"', len(content) // 2)
    path = put(tmp_path / "rows.json", content[:start])
    assert rows_before_damage(path) == rows[: content[:start].count(b"{")]


@pytest.mark.parametrize("missing", [1, 2, 5, 30])
def test_array_without_its_end_is_an_error(tmp_path, missing):
    path = put(tmp_path / "rows.json", json.dumps(numbered(10)).encode()[:-missing])
    found = rows_before_damage(path)
    # Without the bracket all rows are complete; otherwise the last one is not.
    assert found == numbered(10)[: 10 if missing == 1 else 9]


@pytest.mark.parametrize("content", [b'[{"a": 1}] x', b'[{"a": 1}]\n[{"a": 2}]\n'])
def test_content_after_an_array_is_an_error(tmp_path, content):
    # Rows would be lost without a word.
    assert rows_before_damage(put(tmp_path / "rows.json", content)) == [{"a": 1}]


def test_array_that_is_not_utf_8_is_an_error(tmp_path):
    path = put(tmp_path / "rows.json", b'[{"a": 1}, {"a": "caf\xe9"}, {"a": 3}]')
    assert rows_before_damage(path) == [{"a": 1}]


@pytest.mark.parametrize(
    "content", [b'{\n "a": 1\n}\n', b"prompt,chosen\n", b"\x00\x01", b"{'a': 1}\n"]
)
def test_json_that_is_neither_array_nor_lines_is_an_error(tmp_path, content):
    path = put(tmp_path / "rows.json", content)
    rows, message = read_error(path)
    assert rows == []
    assert message == f"{path}: expected an array of objects or one object per line"


def write_truncated_arrow(path, where):
    """Write an arrow file of ten batches of ten rows, truncated within the sixth batch."""
    table = pa.Table.from_pylist(numbered(100))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        for start in range(0, 100, 10):
            stream.write_table(table.slice(start, 10))
            if start == 40:
                end = file.tell()
    path.write_bytes(path.read_bytes()[: end + where])


@pytest.mark.parametrize("where", [4, 20, 200, 500])
def test_truncated_arrow_is_an_error(tmp_path, where):
    path = tmp_path / "rows.arrow"
    write_truncated_arrow(path, where)
    assert rows_before_damage(path) == numbered(50)


def test_arrow_truncated_between_batches_is_an_error(tmp_path):
    # The mark of the end is missing, and with it half of the rows.
    path = tmp_path / "rows.arrow"
    write_truncated_arrow(path, 0)
    assert read_error(path)[0] == numbered(50)


def test_arrow_without_its_start_is_an_error(tmp_path):
    path = write(tmp_path, "rows.arrow", numbered(10))
    path.write_bytes(path.read_bytes()[100:])
    assert rows_before_damage(path) == []


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


def test_text_after_a_closing_quote_in_csv_is_an_error(tmp_path):
    path = put(tmp_path / "rows.csv", b'p,q\n1,2\n"3" x,4\n5,6\n')
    assert rows_before_damage(path) == [{"p": "1", "q": "2"}]


# --- number of rows -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.jsonl.gz", "rows.csv"])
def test_rows_are_counted_without_parsing(tmp_path, name):
    # csv has a header.
    expected = 1001 if name == "rows.csv" else 1000
    rows = [{"a": str(number)} for number in range(1000)]
    assert count_rows(write(tmp_path, name, rows)) == expected


@pytest.mark.parametrize("name", ["rows.arrow", "rows.json"])
def test_rows_of_other_kinds_are_not_counted(tmp_path, name):
    assert count_rows(write(tmp_path, name, [ROW])) is None


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl.gz"])
def test_count_of_a_damaged_file_is_unknown(tmp_path, name):
    path = write(tmp_path, name, numbered(1000))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert count_rows(path) is None
    path.write_bytes(bytes(100))
    assert count_rows(path) is None


def test_count_with_a_damaged_footer_is_unknown(tmp_path):
    path = write(tmp_path, "rows.parquet", numbered(10))
    damage_footer(path)
    assert count_rows(path) is None


# --- memory ---------------------------------------------------------------------------------

PEAK = """
import sys
sys.path.insert(0, sys.argv[1])
from snakechat.data.sources import read_rows
print(sum(1 for _ in read_rows(sys.argv[2])), open("/proc/self/status").read())
"""
# A row of 20,000 characters, ten thousand of which make 200 MB.
LARGE = {"prompt": "x" * 19_980, "chosen": "y" * 20}


def large_lines(path):
    with path.open("w") as file:
        file.writelines([json.dumps(LARGE) + "\n"] * 10_000)


def large_array(path):
    with path.open("w") as file:
        file.write("[")
        file.writelines([json.dumps(LARGE) + ","] * 9_999)
        file.write(json.dumps(LARGE) + "]")


def large_parquet(path, groups):
    table = pa.concat_tables([pa.Table.from_pylist([LARGE] * 100)] * 100)
    rows = len(table) // groups
    pq.write_table(table, path, rows, use_dictionary=False, compression="none")


LARGE_FILES = {
    "jsonl": large_lines,
    "json": large_array,
    "one row group.parquet": lambda path: large_parquet(path, 1),
    "ten row groups.parquet": lambda path: large_parquet(path, 10),
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("name", LARGE_FILES)
def test_200_megabytes_are_read_in_less_than_300_of_memory(tmp_path, name):
    path = tmp_path / f"rows.{name.rpartition('.')[2]}"
    LARGE_FILES[name](path)
    assert path.stat().st_size > 200_000_000
    command = [sys.executable, "-c", PEAK, SCRIPTS, path]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    # getrusage would include the peak of the parent process.
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", process.stdout)[1]) / 1000
    # pytest keeps its folders of several runs.
    path.unlink()
    assert process.stdout.startswith("10000 ")
    assert peak < 300
