"""Rows of source files of every kind, and bad rows in them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import ROOT
from snakechat.data.dataset_files import local_paths, split_files
from snakechat.data.sources import read_rows
from snakechat.workflow.errors import InputError
from support.source_files import (
    NESTING,
    ROW,
    WRITERS,
    numbered,
    put,
    read,
    write,
)

SCRIPTS = ROOT / "scripts"


# --- valid files ----------------------------------------------------------------------------


TEXTS = [
    "",
    " ",
    "a\n\nb\n",
    "a\r\nb\rc",
    "a\u2028b\u2029c\x85d\x0be\x0cf",
    'He said, "no, ""never""", and \'yes\'; \\n \\',
    "a\x00b\x01\x1b[0m\x7f",
    "天空为什么是蓝色的。",
    "😀 \U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\xe9 e\u0301 नि",
    "\ufeffa\ufffd\u200bb\ufeff",
    "007",
    "null",
    "2020-01-01T00:00:00",
]


@pytest.mark.parametrize("name", WRITERS)
def test_texts_are_exact(tmp_path, name):
    rows = [{"prompt": text, "chosen": text} for text in TEXTS]
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
    types = [type(value) for value in found[0].values()]
    assert types == [list, dict, float, bool, int, type(None)]


def test_empty_lines_are_skipped(tmp_path):
    content = b'{"a": 1}\n\n  \n{"a": 2}\r\n\r\n\t\n{"a": 3}'
    found = list(read_rows(put(tmp_path / "rows.jsonl", content)))
    # Numbers are those of lines, as an editor shows them.
    assert found == [(1, {"a": 1}), (4, {"a": 2}), (7, {"a": 3})]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_csv_with_any_line_ends(tmp_path, end):
    text = end.join(["a,b", '"1, ""2""\nx",', "", "3,4", ""])
    path = put(tmp_path / "rows.csv", text.encode())
    assert read(path) == [{"a": '1, "2"\nx', "b": ""}, {"a": "3", "b": "4"}]


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet", "rows.arrow"])
def test_a_column_that_occurs_twice_is_an_error(tmp_path, name):
    path = tmp_path / name
    table = pa.table([["x"], ["y"], ["z"]], names=["a", "b", "a"])
    if name == "rows.csv":
        path.write_text("a,b,a\nx,y,z\n")
    elif name == "rows.parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(InputError, match=r"rows\.\w+: column a occurs twice: rename one of them"):
        list(read_rows(path, ["a", "b"]))
    # Spreadsheets write several columns without a name.
    assert [row["b"] for _, row in read_rows(path, ["b"])] == ["y"]


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


# --- bad rows: a BadRow in place of the row -------------------------------------------------


# Lines, and the start of the reason.
BAD_LINES = {
    "single quotes": (b"{'a': 1}", "invalid JSON"),
    "a full-width colon": (
        '{"a"\uff1a1}'.encode(),
        "invalid JSON: Expecting ':' delimiter: line 1 column 5 (char 4), found '\uff1a1}",
    ),
    "two objects": (b'{"a": 1} {"a": 2}', "invalid JSON"),
    "a line of an array": (
        b"[",
        "invalid JSON: Expecting value: line 2 column 1 (char 2), found '[",
    ),
    "more digits than Python takes": (b'{"a": ' + b"9" * 5000 + b"}", "invalid JSON"),
    "a list": (b'[{"a": 1}]', "is list, expected an object with columns"),
    "nothing": (b"null", "is NoneType, expected an object with columns"),
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_invalid_line_is_a_bad_row(tmp_path, line):
    content, reason = BAD_LINES[line]
    path = put(tmp_path / "rows.jsonl", b'{"a": 1}\n' + content + b'\n{"a": 3}\n')
    first, second, third = read(path)
    assert (first, third) == ({"a": 1}, {"a": 3})
    assert second.startswith(f"bad: {reason}")
    assert "\n" not in second


@pytest.mark.parametrize(("line", "number"), [("a", 1), ("a,b,", 3)])
def test_csv_row_with_another_number_of_cells_is_a_bad_row(tmp_path, line, number):
    content = f'p,q\n"1\n1",é\n{line}\n3,4\n'
    first, second, third = read(put(tmp_path / "rows.csv", content.encode()))
    assert (first, third) == ({"p": "1\n1", "q": "é"}, {"p": "3", "q": "4"})
    assert second == f"bad: {number} cells, the header has 2 columns"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_bytes_that_are_not_utf_8_are_kept_as_surrogates(tmp_path, name):
    # Only a row that uses their text is a bad one.
    content = write(tmp_path, name, [ROW, {**ROW, "prompt": "caf#"}, ROW]).read_bytes()
    found = read(put(tmp_path / name, content.replace(b"#", b"\xe9")))
    assert found == [ROW, {**ROW, "prompt": "caf\udce9"}, ROW]


def latin(rows, bad):
    """Return a table with some texts in Latin-1, which parquet and arrow do not check."""
    cells = [b"caf\xe9" if number in bad else text.encode() for number, text in enumerate(rows)]
    cells = pa.array(cells, pa.binary())
    texts = pa.Array.from_buffers(pa.string(), len(cells), cells.buffers())
    lists = pa.ListArray.from_arrays(pa.array(range(len(rows) + 1), pa.int32()), texts)
    return {"text": pa.table({"a": texts}), "list": pa.table({"a": lists})}


@pytest.mark.parametrize(("kind", "where"), [("parquet", "text"), ("arrow", "list")])
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


# --- memory ---------------------------------------------------------------------------------

PEAK = """
import sys
sys.path.insert(0, sys.argv[1])
from snakechat.data.sources import read_rows
print(sum(1 for _ in read_rows(sys.argv[2])), open("/proc/self/status").read())
"""
# A row of 20,000 characters, ten thousand of which make 200 MB.
LARGE = {"prompt": "x" * 19_980, "chosen": "y" * 20}


def large_array(path):
    with path.open("w") as file:
        file.write("[")
        file.writelines([json.dumps(LARGE) + ","] * 9_999)
        file.write(json.dumps(LARGE) + "]")


def large_parquet(path):
    table = pa.concat_tables([pa.Table.from_pylist([LARGE] * 100)] * 100)
    # One row group.
    pq.write_table(table, path, use_dictionary=False, compression="none")


LARGE_FILES = {"json": large_array, "parquet": large_parquet}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("name", LARGE_FILES)
def test_200_megabytes_are_read_in_less_than_300_of_memory(tmp_path, name):
    path = tmp_path / f"rows.{name}"
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


@pytest.mark.parametrize("name", ["rows.json", "rows.csv"])
def test_byte_order_mark_is_skipped(tmp_path, name):
    path = write(tmp_path, name, [ROW, ROW])
    assert read(put(path, b"\xef\xbb\xbf" + path.read_bytes())) == [ROW, ROW]
