"""Rows of source files: parquet, arrow, jsonl, jsonl.gz, json and csv, one after the other.

Nothing is held in memory but some rows at a time.
"""

import csv
import gzip
import json
import zlib
from pathlib import Path

import ijson
import pyarrow as pa
import pyarrow.parquet as pq

from snakechat.data.dataset_files import kind_of
from snakechat.data.formats import BadRow
from snakechat.workflow.errors import InputError

# Rows of a megabyte are real: so few of them at a time that memory stays bounded.
ROWS_AT_A_TIME = 256
# What the readers raise for a file that is not what its name says.
DAMAGES = (pa.ArrowException, ijson.JSONError, csv.Error, EOFError, OSError, zlib.error)
DAMAGES += (UnicodeDecodeError,)
BOM = b"\xef\xbb\xbf"
# The end of an arrow stream: without it, whole batches may be missing.
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def read_rows(path, columns=None):
    """Yield (number, row) of a file's rows, counted from 1: a dict, or a BadRow in its place.

    columns: names, or paths into them as formats have them, of those that are needed; others are
    not read where the file allows it. Raises InputError, with the file's name and how far it was
    read, for a file that is damaged, cut, of no known kind, without rows or without these columns.
    """
    path, number = Path(path), 0
    if kind_of(path) is None:
        raise InputError(f"{path}: none of the kinds of files that are read: {', '.join(READERS)}")
    with path.open("rb") as file:
        if file.read(40).startswith(b"version https://git-lfs"):
            raise InputError(f"{path}: a Git LFS pointer, not the file itself: run git lfs pull")
    try:
        for number, row in READERS[kind_of(path)](path, columns):
            if not isinstance(row, (dict, BadRow)):
                row = BadRow(f"is {type(row).__name__}, expected an object of columns")
            yield number, row
    except DAMAGES as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{path}: damaged or cut behind row {number} ({path.stat().st_size} bytes): {reason}"
        ) from None
    if not number:
        raise InputError(f"{path}: no rows")


def count_rows(path):
    """About how many rows a file has, for a progress bar; None where only reading would tell."""
    kind = kind_of(path)
    try:
        if kind == "parquet":
            return pq.ParquetFile(path).metadata.num_rows
        if kind in ("jsonl", "jsonl.gz", "csv"):
            with (gzip.open if kind == "jsonl.gz" else open)(path, "rb") as file:
                return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    except DAMAGES:
        # read_rows says what is wrong with the file.
        pass
    return None


def _parquet(path, columns):
    # ParquetFile and not read_table, which takes "a=b" in a path for a partition. Small buffers and
    # no threads: row groups are not read ahead as a whole.
    file = pq.ParquetFile(path, buffer_size=1 << 16, pre_buffer=False)
    needed = _needed(path, file.schema_arrow.names, columns)
    return _rows_of(file.iter_batches(ROWS_AT_A_TIME, columns=needed, use_threads=False))


def _arrow(path, columns):
    """A stream of record batches, as Hugging Face's datasets library saves them."""
    with pa.memory_map(str(path)) as file:
        batches = pa.ipc.open_stream(file)
        needed = _needed(path, batches.schema.names, columns)
        yield from _rows_of(_pieces(batches, needed))
        file.seek(file.size() - len(END_OF_STREAM))
        if file.read() != END_OF_STREAM:
            raise EOFError("the end of the stream is missing")


def _pieces(batches, columns):
    for batch in batches:
        try:
            # Damage in a file that is mapped into memory would be read as if it were lengths.
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            # Text that is not UTF-8 concerns its row alone.
            if "UTF8" not in str(error):
                raise
        for start in range(0, batch.num_rows, ROWS_AT_A_TIME):
            yield batch.select(columns).slice(start, ROWS_AT_A_TIME)


def _needed(path, names, columns):
    """Names of the columns to read. Raises InputError for one that the file does not have."""
    if columns is None:
        return names
    columns = {column if column in names else column.split(".")[0] for column in columns}
    if missing := sorted(columns - set(names)):
        raise InputError(f"{path}: no column {', '.join(missing)}; it has {', '.join(names)}")
    return [name for name in names if name in columns]


def _rows_of(batches):
    number = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except (ValueError, OverflowError):
            rows = [_row_of(batch.slice(index, 1)) for index in range(batch.num_rows)]
        for row in rows:
            number += 1
            yield number, row


def _row_of(batch):
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    # Dates that Python does not know.
    except (ValueError, OverflowError) as error:
        return BadRow(f"{error}")


def _not_utf8(error):
    return BadRow(f"text that is not UTF-8: {error.object[error.start : error.start + 20]!r}")


def _jsonl(path, _):
    """One object a line; empty lines are passed over."""
    with (gzip.open if kind_of(path) == "jsonl.gz" else open)(path, "rb") as file:
        # Split at \n alone: U+2028 is text.
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _object(line.removeprefix(BOM))


def _object(line):
    try:
        row = json.loads(line.decode("utf-8"))
        if b"\\ud" in line or b"\\uD" in line:
            # Half of a surrogate pair is JSON, but no text.
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        return row
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    except (ValueError, RecursionError) as error:
        return BadRow(f"no JSON: {error}")


def _json(path, columns):
    """An array of objects; or one object a line, which is often called .json too."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(BOM).lstrip()
    if not start.startswith(b"["):
        first = next((row for _, row in _jsonl(path, columns)), None)
        if isinstance(first, BadRow):
            raise InputError(f"{path}: neither an array of objects nor one object a line")
        yield from _jsonl(path, columns)
        return
    with path.open("rb") as file:
        if file.read(len(BOM)) != BOM:
            file.seek(0)
        # The default buffer makes long texts slow: each piece of one is joined to the others.
        yield from enumerate(ijson.items(file, "item", buf_size=1 << 22), start=1)


def _csv(path, _):
    """Columns from the first line. What is not UTF-8 concerns its row alone."""
    # The library's limit is 128 KiB a cell; the largest that it takes is a C long.
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        columns = next(reader, [])
        for number, cells in enumerate((cells for cells in reader if cells), start=1):
            if len(cells) != len(columns):
                yield number, BadRow(f"{len(cells)} cells, the first line has {len(columns)}")
                continue
            try:
                "".join(cells).encode("utf-8")
                yield number, dict(zip(columns, cells, strict=True))
            except UnicodeEncodeError as error:
                text = error.object[error.start : error.start + 20]
                yield number, BadRow(f"text that is not UTF-8: {text!r}")


READERS = {
    "parquet": _parquet,
    "arrow": _arrow,
    "jsonl": _jsonl,
    "jsonl.gz": _jsonl,
    "json": _json,
    "csv": _csv,
}
