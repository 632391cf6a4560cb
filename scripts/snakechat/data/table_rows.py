"""Rows of parquet and arrow files."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from snakechat.data.cells import BadRow
from snakechat.data.dialogues import TOOLS
from snakechat.data.formats import missing_hint
from snakechat.data.message_columns import MEDIA
from snakechat.workflow.errors import InputError

# Rows may have megabytes: the batches are small so that memory stays bounded.
ROWS_AT_A_TIME = 64
# Marks the end of an arrow stream. Without it, whole batches may be missing.
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
# The start of an Arrow file, which has its batches at positions.
ARROW_FILE = b"ARROW1"


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
        _check_end(file)


def read_saved(folder: Path, columns: Collection[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Read a dataset that the datasets library saved to disk.

    Raises:
        ValueError: The library rejects the folder.
    """
    from datasets import load_from_disk

    try:
        dataset = load_from_disk(str(folder))
    # The library raises exceptions of many classes for damaged files.
    except Exception as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None
    for saved in dataset.cache_files:
        with open(saved["filename"], "rb") as file:
            file.seek(-len(END_OF_STREAM), os.SEEK_END)
            _check_end(file)
    batches = dataset.data.table.to_batches()
    selected = _select_columns(folder, dataset.data.table.schema.names, columns)
    yield from _rows_of(_slices(batches, selected))


def _check_end(file: Any) -> None:
    """Raise EOFError unless the end of a stream follows."""
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
    """Return the names of the columns to read: also tools, and images and the like.

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
    more = (name for name in names if name == TOOLS or MEDIA.fullmatch(name))
    wanted = required | set(more)
    selected = [name for name in names if name in wanted]
    check_names(path, selected)
    return selected


def check_names(path: Path, names: Sequence[str]) -> None:
    """Raise InputError if a file has two columns of a name: a row would keep one of them."""
    twice = [name for name, number in Counter(names).items() if number > 1]
    if twice:
        raise InputError(f"{path}: column {twice[0]} occurs twice: rename one of them")


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
