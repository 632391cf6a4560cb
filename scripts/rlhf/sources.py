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

from rlhf.formats import BadRow
from rlhf.job import InputError
from rlhf.parts import kind_of

# Rows of a megabyte are real: so few of them at a time that memory stays bounded.
ROWS_AT_A_TIME = 256


def read_rows(path):
    """Yield (number, row) of a file's rows, counted from 1: a dict, or a BadRow in its place.

    Raises InputError, with the file's name and how far it was read, for a file that is damaged,
    cut, of no known kind or without rows.
    """
    path, number = Path(path), 0
    if path.open("rb").read(40).startswith(b"version https://git-lfs"):
        raise InputError(f"{path}: a Git LFS pointer, not the file itself: run git lfs pull")
    try:
        for number, row in READERS[kind_of(path)](path):
            if not isinstance(row, (dict, BadRow)):
                row = BadRow(f"is {type(row).__name__}, expected an object of columns")
            yield number, row
    except (pa.ArrowException, ijson.JSONError, csv.Error, EOFError, OSError, zlib.error) as error:
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
        if kind in ("jsonl", "csv"):
            with open(path, "rb") as file:
                return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    except pa.ArrowException:
        # read_rows says what is wrong with the file.
        pass
    return None


def _parquet(path):
    # ParquetFile and not read_table, which takes "a=b" in a path for a partition.
    file = pq.ParquetFile(path)
    return _rows_of(file.iter_batches(batch_size=ROWS_AT_A_TIME))


def _arrow(path):
    """A stream of record batches, as Hugging Face's datasets library saves them."""
    with pa.memory_map(str(path)) as file:
        batches = pa.ipc.open_stream(file)
        yield from _rows_of(
            batch.slice(start, ROWS_AT_A_TIME)
            for batch in batches
            for start in range(0, batch.num_rows, ROWS_AT_A_TIME)
        )


def _rows_of(batches):
    number = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError:
            rows = [_row_of(batch.slice(index, 1)) for index in range(batch.num_rows)]
        for row in rows:
            number += 1
            yield number, row


def _row_of(batch):
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return _not_utf8(error)


def _not_utf8(error):
    return BadRow(f"text that is not UTF-8: {error.object[error.start : error.start + 20]!r}")


def _jsonl(path):
    """One object a line; empty lines are passed over."""
    with (gzip.open if kind_of(path) == "jsonl.gz" else open)(path, "rb") as file:
        # Split at \n alone: U+2028 is text.
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _object(line.removeprefix(b"\xef\xbb\xbf"))


def _object(line):
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    except ValueError as error:
        return BadRow(f"no JSON: {error}")


def _json(path):
    """An array of objects; or one object a line, which is often called .json too."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"[") or not start:
        with path.open("rb") as file:
            if file.read(3) != b"\xef\xbb\xbf":
                file.seek(0)
            yield from enumerate(ijson.items(file, "item", use_float=True), start=1)
    elif isinstance(_first_line(path), BadRow):
        raise InputError(f"{path}: neither an array of objects nor one object a line")
    else:
        yield from _jsonl(path)


def _first_line(path):
    with path.open("rb") as file:
        return _object(file.readline().removeprefix(b"\xef\xbb\xbf"))


def _csv(path):
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
