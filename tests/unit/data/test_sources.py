"""Rows of source files of every kind, bad rows in them, and damaged files."""

import gzip
import json
import subprocess
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import ROOT
from import_dataset import converted_row
from snakechat.data import sources
from snakechat.data.cells import BadRow
from snakechat.data.dataset_files import saved_splits
from snakechat.data.formats import columns_of
from snakechat.data.sources import read_rows
from snakechat.workflow.errors import InputError
from support.files import KINDS, as_arrow, as_jsonl, as_table

# One object per line in a file named .json, too; a compressed file and a plain one that are named
# as the other is.
WRITERS = {f"rows.{kind}": writer for kind, writer in KINDS.items()} | {"lines.json": as_jsonl}
WRITERS |= {"packed.jsonl": KINDS["jsonl.gz"], "unpacked.jsonl.gz": as_jsonl}
WRITERS["lz4.jsonl"] = lambda rows: bytes(pa.Codec("lz4").compress(as_jsonl(rows)))
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


def rows_before_damage(path):
    """Return the rows before damage; the error has their number and the size of the file."""
    rows = []
    with pytest.raises(InputError) as error:
        rows.extend(row for _, row in read_rows(path))
    place = f"damaged or truncated after row {len(rows)} ({path.stat().st_size} bytes): "
    assert str(error.value).startswith(f"{path}: {place}")
    assert "\n" not in str(error.value)
    return rows


# --- valid files ----------------------------------------------------------------------------

TEXTS = [
    "",
    " ",
    "a\r\nb\rc\n",
    "a\u2028b\u2029c\x85d\x0be\x0cf",
    'He said, "no, ""never""", and \'yes\'; \\n \\',
    "a\x00b\x01\x1b[0m\x7f",
    "天空😀 \U0001f469\u200d\U0001f467 e\u0301 नि",
    "\ufeffa\ufffd\u200bb\ufeff",
    "007",
    "null",
    "2020-01-01T00:00:00",
]


@pytest.mark.parametrize("name", WRITERS)
def test_values_are_exact(tmp_path, name):
    # A byte-order mark at the start of a row of csv is not text.
    rows = [{"number": "1", "prompt": text, "chosen": text} for text in TEXTS]
    if "csv" not in name and "tsv" not in name:
        rows = [
            {**row, "list": [{"a": ["x"], "n": None}], "count": 2**62, "is": True} for row in rows
        ]
    assert read(write(tmp_path, name, rows)) == rows


def test_empty_lines_are_skipped(tmp_path):
    content = b'{"a": 1}\n\n  \n{"a": 2}\r\n\r\n\t\n{"a": 3}'
    found = list(read_rows(put(tmp_path / "rows.jsonl", content)))
    # Rows are numbered by their lines, as an editor shows them.
    assert found == [(1, {"a": 1}), (4, {"a": 2}), (7, {"a": 3})]
    assert read(put(tmp_path / "rows.csv", b"a,b\r\n1,\r\n\r\n3,4\r\n")) == [
        {"a": "1", "b": ""},
        {"a": "3", "b": "4"},
    ]


@pytest.mark.parametrize("name", ["rows.json", "lines.json", "rows.csv"])
def test_byte_order_mark_is_skipped(tmp_path, name):
    path = write(tmp_path, name, [ROW, ROW])
    assert read(put(path, b"\xef\xbb\xbf" + path.read_bytes())) == [ROW, ROW]


def test_arrow_files_are_read_as_streams_are(tmp_path):
    table = as_table([ROW] * 3)
    with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as file:
        file.write_table(table)
    assert read(tmp_path / "rows.arrow") == [ROW] * 3


TWICE = pa.table([["x"], ["y"], ["z"]], names=["a", "b", "a"])


@pytest.mark.parametrize(
    ("name", "content"), [("rows.csv", b"a,b,a\nx,y,z\n"), ("rows.arrow", as_arrow(TWICE))]
)
def test_a_column_that_occurs_twice_is_an_error(tmp_path, name, content):
    path = put(tmp_path / name, content)
    with pytest.raises(InputError, match=r"rows\.\w+: column a occurs twice: rename one of them"):
        list(read_rows(path, ["a", "b"]))
    # Spreadsheets write several columns without a name.
    assert [row["b"] for _, row in read_rows(path, ["b"])] == ["y"]


def test_a_dataset_that_was_saved_to_disk_is_read(tmp_path):
    conversation = {"messages": [{"role": "user", "content": "你好"}], "source": None}
    rows = [{**row, **conversation} for row in numbered(700)]
    dataset, folder = datasets.Dataset.from_list(rows), tmp_path / "mine"
    # A split without rows has no files.
    sizes = {"train": 700, "test": 3, "validation": 0}
    splits = {name: dataset.select(range(size)) for name, size in sizes.items()}
    shards = {"train": 2, "test": 1, "validation": None}
    datasets.DatasetDict(splits).save_to_disk(folder, num_shards=shards)
    files = saved_splits(folder)
    assert files["test"] == ["test/data-00000-of-00001.arrow"]
    assert [row for path in files["train"] for row in read(folder / path)] == rows
    assert len(files["train"]) == len(files) == 2
    assert saved_splits(folder / "test") == {"train": ["data-00000-of-00001.arrow"]}
    assert saved_splits(tmp_path) == {}
    (folder / "test/state.json").write_text("{")
    with pytest.raises(InputError, match=r"test/state\.json is damaged: save the dataset again"):
        saved_splits(folder)


# --- bad rows: a BadRow in place of the row -------------------------------------------------

DEEP = b"[" * 200_000 + b"]" * 200_000


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        *(
            ("rows.jsonl", f'{{"a": "1"}}\n{line}\n{{"a": "3"}}', f"invalid JSON: {reason}")
            for line, reason in (
                ('{"a";1}', "Expecting ':' delimiter: line 1 column 5 (char 4), found ';1}"),
                # More digits than Python takes.
                ('{"a": ' + "9" * 5000 + "}", ""),
                (DEEP.decode(), "nested too deeply"),
                ('{"a": [{"b": 1, "b": 1}]}', "key 'b' occurs twice in an object: keep one"),
            )
        ),
        ("rows.json", '[{"a": "1"}, {"a": {"b": 1, "b": 2}}, {"a": "3"}]', "invalid JSON: "),
        ("rows.csv", "a\n1\n2,2\n3\n", "2 cells, the header has 1 columns"),
        # Where files were joined.
        ("rows.csv", "\ufeffa\n1\n\ufeff2\n3\n", "starts with a byte-order mark, as where files"),
    ],
)
def test_bad_rows(tmp_path, name, content, reason):
    first, second, third = read(put(tmp_path / name, content.encode()))
    assert (first, third) == ({"a": "1"}, {"a": "3"})
    assert second.startswith(f"bad: {reason}") and "\n" not in second


def test_rows_inside_of_an_object_are_not_read(tmp_path):
    # The last line would be a row, and on_bad_row: skip drops the others.
    path = put(tmp_path / "rows.json", b'{"rows": [\n{"a": "1"},\n{"a": "2"}\n]}')
    with pytest.raises(InputError, match="expected an array of objects or one object per line"):
        list(read_rows(path))
    # The name .jsonl says that each line is a row.
    first, *_, last = read(path.rename(tmp_path / "rows.jsonl"))
    assert first.startswith("bad: invalid JSON: Expecting value") and last.startswith("bad: ")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_bytes_that_are_not_utf_8_are_kept_as_surrogates(tmp_path, name):
    # Only a row that uses their text is a bad one.
    content = write(tmp_path, name, [ROW, {**ROW, "prompt": "caf#"}, ROW]).read_bytes()
    found = read(put(tmp_path / name, content.replace(b"#", b"\xe9")))
    assert found == [ROW, {**ROW, "prompt": "caf\udce9"}, ROW]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_rows_of_tables_that_are_not_utf_8_are_bad_rows(tmp_path, name):
    texts, bad = [f"é{number}" for number in range(600)], {0, 299, 300, 599}
    # Some in Latin-1, which neither parquet nor arrow checks.
    cells = [b"caf\xe9" if number in bad else text.encode() for number, text in enumerate(texts)]
    cells = pa.array(cells, pa.binary())
    cells = pa.Array.from_buffers(pa.string(), len(cells), cells.buffers())
    if name == "rows.arrow":
        cells = pa.ListArray.from_arrays(pa.array(range(601), pa.int32()), cells)
        texts = [[text] for text in texts]
    found = read(write(tmp_path, name, pa.table({"a": cells})))
    assert len(found) == 600
    for number, row in enumerate(found):
        if number in bad:
            assert row.startswith("bad: text that is not UTF-8: b'")
        else:
            assert row == {"a": texts[number]}


# --- damaged files --------------------------------------------------------------------------

ROWS = numbered(1000)


def replaced(content, start, new=b"\xff\x00\xff\x00"):
    return content[:start] + new + content[start + len(new) :]


def cut_after_five_batches(content):
    file = pa.BufferReader(content)
    batches = pa.ipc.open_stream(file)
    for _ in range(5):
        batches.read_next_batch()
    return content[: file.tell()]


# A file of ROWS, its damage, and the number of rows before it, if it is certain.
DAMAGES = {
    # The positions of the rows are at the end of the file.
    "parquet, the end is missing": ("rows.parquet", lambda data: data[:-9], 0),
    # Some programs reserve the size of a file before they write it.
    "gzip, only zeros": ("rows.jsonl.gz", lambda data: bytes(len(data)), 0),
    "gzip, the check sum": ("rows.jsonl.gz", lambda data: replaced(data, len(data) - 8), None),
    "arrow, a batch": ("rows.arrow", lambda data: cut_after_five_batches(data)[:-200], 400),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_an_error_after_the_rows_before_it(tmp_path, damage):
    name, change, number = DAMAGES[damage]
    path = write(tmp_path, name, ROWS)
    path.write_bytes(change(path.read_bytes()))
    found = rows_before_damage(path)
    assert found == ROWS[: len(found)]
    assert number is None or len(found) == number


def test_damaged_offsets_of_arrow_are_an_error(tmp_path):
    content = as_arrow([{"a": f"text {number}"} for number in range(100)])
    # The texts have 6 characters up to number 9, then 7: the eleventh begins at 60, then 67, 74.
    start = content.index(b"".join(n.to_bytes(4, "little") for n in (60, 67, 74)))
    rows_before_damage(put(tmp_path / "rows.arrow", replaced(content, start, bytes(40))))


@pytest.mark.parametrize(
    "end", [b', {"a": 2} {"a": 3}]', b', {"a": ' + b"9" * 5000 + b"}]", b"] x", b", " + DEEP]
)
def test_invalid_array_is_an_error(tmp_path, end):
    # Nothing tells where the next item starts.
    found = rows_before_damage(put(tmp_path / "rows.json", b'[{"a": 1},{"a": 2}' + end))
    assert found[:1] == [{"a": 1}]


def test_unclosed_quotes_and_utf_16_in_csv_are_errors(tmp_path):
    path = put(tmp_path / "rows.csv", b'p,q\n1,2\n"3,4\n5,6\n')
    assert rows_before_damage(path) == [{"p": "1", "q": "2"}]
    with pytest.raises(InputError, match="in UTF-16: save the file as text in UTF-8"):
        list(read_rows(put(tmp_path / "wide.csv", "p,q\n1,2\n".encode("utf-16"))))


# --- bounds of rows, and of the memory that reading takes ----------------------------------------

GOOD = {"prompt": "a", "chosen": "b"}


def test_items_may_end_anywhere_in_a_chunk(tmp_path, monkeypatch):
    items = [{"a": 'x\\"]},[{'}, {"b": [1.5, {"c": None}]}, {}]
    path = put(tmp_path / "rows.json", json.dumps(items, indent=1).encode())
    for chunk in range(2, 40):
        monkeypatch.setattr(sources, "CHUNK", chunk)
        assert read(path) == items


@pytest.mark.parametrize("name", ["rows.json", "rows.csv"])
def test_text_whose_end_is_unknown_is_an_error(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sources, "CHUNK", 20_000)
    monkeypatch.setattr(sources, "MAX_ITEM", 400_000)
    monkeypatch.setattr(sources, "MAX_CELL", 400_000)
    # A cell of csv that Python's own limit would reject, and one over ours.
    short, long = ({**GOOD, "chosen": 'x"\n' * number} for number in (50_000, 200_000))
    assert read(write(tmp_path, name, [GOOD, short, GOOD])) == [GOOD, short, GOOD]
    assert rows_before_damage(write(tmp_path, name, [GOOD, long, GOOD])) == [GOOD]


READER = """if True:
    import pathlib, sys
    from snakechat.data.sources import read_rows
    from snakechat.workflow.processes import limited_memory
    with limited_memory(int(sys.argv[2]) << 20):
        print(sum(1 for _ in read_rows(pathlib.Path(sys.argv[1]))))
"""


def read_within(path, mib):
    """Read a file in a process of its own: other tests leave memory that would be used first."""
    command = [sys.executable, "-c", READER, path, str(mib)]
    return subprocess.run(command, cwd=ROOT / "scripts", capture_output=True, text=True)


def test_decompression_bomb_is_an_error(tmp_path):
    # A line of 300 MB; and one text in all rows, which the file has once, in a dictionary.
    text, table = tmp_path / "rows.jsonl.gz", tmp_path / "rows.parquet"
    text.write_bytes(gzip.compress(b"x" * 300_000_000, 1))
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 250), pa.array(["x" * 5_000_000]))
    pq.write_table(pa.table({"prompt": texts}), table, compression="zstd")
    for path in (text, table):
        assert "MemoryError" in read_within(path, 200).stderr


# 100 rows of 20,000 characters; a hundred times as many make 200 MB.
LARGE = [{**GOOD, "prompt": "x" * 20_000}] * 100


def test_a_file_is_read_in_less_memory_than_its_size(tmp_path):
    array, group = tmp_path / "rows.json", tmp_path / "rows.parquet"
    with array.open("w") as file:
        file.writelines(["[", *[json.dumps(LARGE)[1:-1] + ","] * 100, json.dumps(GOOD) + "]"])
    table = pa.concat_tables([pa.Table.from_pylist(LARGE)] * 100 + [pa.Table.from_pylist([GOOD])])
    pq.write_table(table, group, use_dictionary=False, compression="none")
    for path in (array, group):
        assert path.stat().st_size > 200_000_000
        assert read_within(path, 150).stdout == "10001\n"
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
    settings = {"format": "plain", "columns": columns, "keep": dict(zip(keep, keep, strict=True))}
    with pytest.raises(BadRow) as error:
        converted_row(row, settings)
    assert str(error.value).startswith(reason)
    # A column that nothing uses does no harm.
    if keep:
        assert converted_row(row, settings | {"keep": {}})[3:] == ()
