"""Rows of source files: parquet, arrow, jsonl, json, csv and tsv.

A few rows are held at a time. The datasets library does not read them, because it loses what
tests/unit/data/test_sources.py requires: the row number of a bad row, memory bounds for a json
array (1.2 GB for a file of 130 MB), and texts that look like numbers or dates.
"""

import csv
import lzma
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from snakechat.data.cells import BadRow, check_names
from snakechat.data.dataset_files import check_kinds, kind_of
from snakechat.data.dialogues import TOOLS
from snakechat.data.formats import missing_hint
from snakechat.data.message_columns import CONTEXT, MEDIA
from snakechat.data.model_files import LFS_POINTER
from snakechat.data.text_rows import read_csv, read_json, read_lines
from snakechat.workflow.errors import InputError

# Row number from 1, and the row: a dict, or a BadRow in its place.
NumberedRow = tuple[int, Any]

# Rows may have megabytes: the batches are small so that memory stays bounded.
ROWS_AT_A_TIME = 64
# Marks the end of an arrow stream. Without it, whole batches may be missing.
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
# The start of an Arrow file, which has its batches at positions.
ARROW_FILE = b"ARROW1"

# What the readers raise for a file that does not have the format of its name.
DAMAGES: tuple[type[Exception], ...] = (
    pa.ArrowException,
    csv.Error,
    EOFError,
    OSError,
    lzma.LZMAError,
    zlib.error,
    # Also UnicodeDecodeError.
    ValueError,
    RecursionError,
)


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
    path, number = Path(path), 0
    check_kinds([path])
    with path.open("rb") as file:
        start = file.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        raise InputError(f"{path}: a Git LFS pointer instead of the file: run git lfs pull")
    try:
        for number, row in READERS[str(kind_of(path))](path, columns):
            if not isinstance(row, (dict, BadRow)):
                row = BadRow(f"is {type(row).__name__}, expected an object with columns")
            yield number, row
    except MemoryError:
        # That of Arrow is an ArrowException, too.
        raise
    except DAMAGES as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        size = path.stat().st_size
        raise InputError(
            f"{path}: damaged or truncated after row {number} ({size} bytes): {reason}"
        ) from None
    if not number:
        raise InputError(f"{path}: no rows")


def read_parquet(path: Path, columns: Collection[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Read the rows of a parquet file in batches."""
    # Not read_table, which parses "a=b" in a path as a partition. The options avoid reading whole
    # row groups ahead.
    file = pq.ParquetFile(path, buffer_size=1 << 16, pre_buffer=False)
    selected = _select_columns(path, file.schema_arrow.names, columns)
    return _rows_of(file.iter_batches(ROWS_AT_A_TIME, columns=selected, use_threads=False))


def read_arrow(path: Path, columns: Collection[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Read record batches: a stream, as the datasets library saves them, or an Arrow file."""
    with pa.memory_map(str(path)) as file:
        if file.read(len(ARROW_FILE)) == ARROW_FILE:
            table = pa.ipc.open_file(file)
            selected = _select_columns(path, table.schema.names, columns)
            batches = map(table.get_batch, range(table.num_record_batches))
            yield from _rows_of(_slices(batches, selected))
            return
        file.seek(0)
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
    """Return the names of the columns to read: also tools, system, history, images and the like.

    Raises:
        InputError: The file lacks a column.
    """
    if columns is None:
        return names
    required = {column if column in names else column.split(".")[0] for column in columns}
    if missing := sorted(required - set(names)):
        raise InputError(
            f"{path}: column {', '.join(missing)} is missing; the file has {', '.join(names)}"
            f"{missing_hint(missing[-1])}"
        )
    more = (name for name in names if name in (TOOLS, *CONTEXT) or MEDIA.fullmatch(name))
    wanted = required | set(more)
    selected = [name for name in names if name in wanted]
    check_names(path, selected)
    return selected


def _rows_of(batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield the rows of batches."""
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
        return BadRow(f"text that is not UTF-8: {error.object[error.start : error.start + 20]!r}")
    # Dates outside Python's range.
    except (ValueError, OverflowError) as error:
        return BadRow(f"{error}")


READERS: dict[str, Callable[[Path, Collection[str] | None], Iterator[NumberedRow]]] = {
    "parquet": read_parquet,
    "arrow": read_arrow,
    "jsonl": read_lines,
    "json": read_json,
    "csv": read_csv,
    "tsv": partial(read_csv, delimiter="\t"),
}
