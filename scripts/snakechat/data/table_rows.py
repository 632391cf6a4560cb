"""Rows of parquet and arrow files."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from snakechat.data.cells import BadRow
from snakechat.data.dialogues import TOOLS
from snakechat.data.formats import missing_hint
from snakechat.data.row_bounds import MAX_ROW_BYTES, too_long
from snakechat.workflow.errors import InputError

# Rows may have megabytes: the batches are small so that memory stays bounded.
ROWS_AT_A_TIME = 64
# Bytes that the rows of a batch of parquet may have on average.
MAX_BATCH_BYTES = 64 << 20
# A file may decode to this many times its size, or to MAX_DECODED_BYTES if that is more.
MAX_EXPANSION = 1000
MAX_DECODED_BYTES = 1 << 30
# Marks the end of an arrow stream. Without it, whole batches may be missing.
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def read_parquet(path: Path, columns: Collection[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Read the rows of a parquet file in batches."""
    # Not read_table, which parses "a=b" in a path as a partition. The options avoid reading whole
    # row groups ahead.
    file = pq.ParquetFile(path, buffer_size=1 << 16, pre_buffer=False)
    selected = _select_columns(path, file.schema_arrow.names, columns)
    rows = _rows_per_batch(file.metadata)
    return _rows_of(file.iter_batches(rows, columns=selected, use_threads=False), path)


def _rows_per_batch(metadata: Any) -> int:
    """Return the number of rows that have MAX_BATCH_BYTES, by the average size of the rows."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    largest = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=1)
    return min(ROWS_AT_A_TIME, max(1, MAX_BATCH_BYTES // max(1, largest)))


def read_arrow(path: Path, columns: Collection[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Read a stream of record batches, as the datasets library saves them."""
    with pa.memory_map(str(path)) as file:
        batches = pa.ipc.open_stream(file)
        selected = _select_columns(path, batches.schema.names, columns)
        yield from _rows_of(_slices(batches, selected), path)
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
    """Return the names of the columns to read: also the tools of dialogues, which import rejects.

    Raises:
        InputError: The file lacks a column.
    """
    if columns is None:
        return names
    required = {column if column in names else column.split(".")[0] for column in columns}
    if missing := sorted(required - set(names)):
        raise InputError(
            f"{path}: column {', '.join(missing)} is missing; the file has {', '.join(names)}"
            f"{missing_hint(missing[-1], names)}"
        )
    selected = [name for name in names if name in required or name == TOOLS]
    check_names(path, selected)
    return selected


def check_names(path: Path, names: Sequence[str]) -> None:
    """Raise InputError if a file has two columns of a name: a row would keep one of them."""
    twice = [name for name, number in Counter(names).items() if number > 1]
    if twice:
        raise InputError(f"{path}: column {twice[0]} occurs twice: rename one of them")


def _rows_of(batches: Iterable[Any], path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows of batches.

    Raises:
        MemoryError: The cells of the file have so many bytes that it must be a decompression bomb.
    """
    number = decoded = 0
    limit = max(MAX_DECODED_BYTES, MAX_EXPANSION * path.stat().st_size)
    for encoded in batches:
        batch = _without_dictionaries(encoded)
        decoded += batch.nbytes
        if decoded > limit:
            raise MemoryError
        rows = None
        if batch.nbytes <= MAX_ROW_BYTES:
            with suppress(ValueError, OverflowError):
                rows = batch.to_pylist()
        if rows is None:
            # Convert row by row to find the bad ones.
            rows = (_row_of(batch.slice(index, 1)) for index in range(batch.num_rows))
        for row in rows:
            number += 1
            yield number, row


def _without_dictionaries(batch: Any) -> Any:
    """Return a batch with texts in place of the numbers by which a dictionary stores them once."""
    columns = [
        column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _row_of(batch: Any) -> Any:
    if batch.nbytes > MAX_ROW_BYTES:
        return too_long()
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return BadRow(f"text that is not UTF-8: {error.object[error.start : error.start + 20]!r}")
    # Dates outside Python's range.
    except (ValueError, OverflowError) as error:
        return BadRow(f"{error}")
