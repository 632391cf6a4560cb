"""Rows of source files: parquet, arrow, jsonl, jsonl.gz, json and csv.

Memory is bounded: a few rows are held at a time. The datasets library is not used, because it loses
what tests/unit/data/test_sources.py requires: the row number of a bad row, memory bounds for a json
array (1.2 GB for a file of 130 MB), and texts that look like numbers or dates.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import ijson
import pyarrow as pa
import pyarrow.parquet as pq

from snakechat.data.dataset_files import kind_of
from snakechat.data.formats import BadRow
from snakechat.workflow.errors import InputError

# Row number from 1, and the row: a dict, or a BadRow in its place.
NumberedRow = tuple[int, Any]

# Rows may have megabytes: the batches are small so that memory stays bounded.
ROWS_AT_A_TIME = 256
# What the readers raise for a file that does not have the format of its name.
DAMAGES: tuple[type[Exception], ...] = (
    pa.ArrowException,
    ijson.JSONError,
    csv.Error,
    EOFError,
    OSError,
    zlib.error,
    UnicodeDecodeError,
)
BOM = b"\xef\xbb\xbf"
# Marks the end of an arrow stream. Without it, whole batches may be missing.
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def read_rows(
    path: str | Path, columns: Collection[str] | None = None
) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Yield the number, from 1, of each row of a file, and the row or a BadRow in its place.

    Args:
        path: A file whose name ends in one of the kinds in READERS.
        columns: Columns, or paths into them, to read; defaults to all. Only parquet and arrow skip
            the others.

    Raises:
        InputError: The file is damaged or truncated, is of an unknown kind, or lacks rows or one of
            the columns.
    """
    path, number, kind = Path(path), 0, kind_of(path)
    if kind is None:
        raise InputError(f"{path}: unknown kind of file, expected one of {', '.join(READERS)}")
    with path.open("rb") as file:
        if file.read(40).startswith(b"version https://git-lfs"):
            raise InputError(f"{path}: a Git LFS pointer instead of the file: run git lfs pull")
    try:
        for number, row in READERS[kind](path, columns):
            if not isinstance(row, (dict, BadRow)):
                row = BadRow(f"is {type(row).__name__}, expected an object with columns")
            yield number, row
    except DAMAGES as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        size = path.stat().st_size
        raise InputError(
            f"{path}: damaged or truncated after row {number} ({size} bytes): {reason}"
        ) from None
    if not number:
        raise InputError(f"{path}: no rows")


def count_rows(path: str | Path) -> int | None:
    """Return the approximate number of rows for a progress bar.

    Returns None if only reading the file would give the number.
    """
    kind = kind_of(path)
    try:
        if kind == "parquet":
            return pq.ParquetFile(path).metadata.num_rows
        if kind in ("jsonl", "jsonl.gz", "csv"):
            with _open(Path(path)) as file:
                return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))
    except DAMAGES:
        # read_rows reports the damage.
        pass
    return None


def _open(path: Path) -> Any:
    """Open a file, compressed or not, for reading bytes."""
    return (gzip.open if kind_of(path) == "jsonl.gz" else open)(path, "rb")


def _parquet(path: Path, columns: Collection[str] | None) -> Iterator[NumberedRow]:
    # Not read_table, which parses "a=b" in a path as a partition. The options avoid reading whole
    # row groups ahead.
    file = pq.ParquetFile(path, buffer_size=1 << 16, pre_buffer=False)
    selected = _select_columns(path, file.schema_arrow.names, columns)
    return _rows_of(file.iter_batches(ROWS_AT_A_TIME, columns=selected, use_threads=False))


def _arrow(path: Path, columns: Collection[str] | None) -> Iterator[NumberedRow]:
    """Read a stream of record batches, as the datasets library saves them."""
    with pa.memory_map(str(path)) as file:
        batches = pa.ipc.open_stream(file)
        selected = _select_columns(path, batches.schema.names, columns)
        yield from _rows_of(_slices(batches, selected))
        file.seek(file.size() - len(END_OF_STREAM))
        if file.read() != END_OF_STREAM:
            raise EOFError("the end of the stream is missing")


def _slices(batches: Iterable[Any], columns: list[str]) -> Iterator[Any]:
    for batch in batches:
        try:
            # Damaged offsets in mapped memory would otherwise be used unchecked.
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            # Text that is not UTF-8 makes only its row a bad one.
            if "UTF8" not in str(error):
                raise
        for start in range(0, batch.num_rows, ROWS_AT_A_TIME):
            yield batch.select(columns).slice(start, ROWS_AT_A_TIME)


def _select_columns(path: Path, names: list[str], columns: Collection[str] | None) -> list[str]:
    """Return the names of the columns to read. Raises InputError if the file lacks a column."""
    if columns is None:
        return names
    required = {column if column in names else column.split(".")[0] for column in columns}
    if missing := sorted(required - set(names)):
        raise InputError(
            f"{path}: column {', '.join(missing)} is missing; the file has {', '.join(names)}"
        )
    return [name for name in names if name in required]


def _rows_of(batches: Iterable[Any]) -> Iterator[NumberedRow]:
    number = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except (ValueError, OverflowError):
            # Convert row by row to find the bad ones.
            rows = [_row_of(batch.slice(index, 1)) for index in range(batch.num_rows)]
        for row in rows:
            number += 1
            yield number, row


def _row_of(batch: Any) -> Any:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    # Dates outside Python's range.
    except (ValueError, OverflowError) as error:
        return BadRow(f"{error}")


def _not_utf8(error: UnicodeDecodeError) -> BadRow:
    return BadRow(f"text that is not UTF-8: {error.object[error.start : error.start + 20]!r}")


def _jsonl(path: Path, _: Collection[str] | None) -> Iterator[NumberedRow]:
    """Read one object per line; empty lines are skipped but counted."""
    with _open(path) as file:
        # Iterating over bytes splits at \n only: U+2028 is text.
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _object(line.removeprefix(BOM))


def _object(line: bytes) -> Any:
    try:
        row = json.loads(line.decode("utf-8"))
        if b"\\ud" in line or b"\\uD" in line:
            # Half of a surrogate pair is valid JSON, but cannot be encoded.
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        return row
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    except (ValueError, RecursionError) as error:
        return BadRow(f"invalid JSON: {error}")


def _json(path: Path, columns: Collection[str] | None) -> Iterator[NumberedRow]:
    """Read an array of objects, or one object per line: such files are often named .json too."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(BOM).lstrip()
    if not start.startswith(b"["):
        first = next((row for _, row in _jsonl(path, columns)), None)
        if isinstance(first, BadRow):
            raise InputError(f"{path}: expected an array of objects or one object per line")
        yield from _jsonl(path, columns)
        return
    with path.open("rb") as file:
        if file.read(len(BOM)) != BOM:
            file.seek(0)
        # With the default buffer long texts are slow: they are joined from many pieces.
        yield from enumerate(ijson.items(file, "item", buf_size=1 << 22), start=1)


def _csv(path: Path, _: Collection[str] | None) -> Iterator[NumberedRow]:
    """Read rows with the columns of the header. Text that is not UTF-8 makes its row a bad one."""
    # The default limit is 128 KiB per cell; the highest one is a C long.
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        columns = next(reader, [])
        for number, cells in enumerate((cells for cells in reader if cells), start=1):
            if len(cells) != len(columns):
                yield number, BadRow(f"{len(cells)} cells, the header has {len(columns)} columns")
                continue
            try:
                "".join(cells).encode("utf-8")
                yield number, dict(zip(columns, cells, strict=True))
            except UnicodeEncodeError as error:
                text = error.object[error.start : error.start + 20]
                yield number, BadRow(f"text that is not UTF-8: {text!r}")


READERS: dict[str, Callable[[Path, Collection[str] | None], Iterator[NumberedRow]]] = {
    "parquet": _parquet,
    "arrow": _arrow,
    "jsonl": _jsonl,
    "jsonl.gz": _jsonl,
    "json": _json,
    "csv": _csv,
}
