"""Rows of parquet and arrow files."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from snakechat.data.formats import TOOLS, BadRow, missing_hint
from snakechat.data.row_bounds import MAX_BATCH_BYTES, MAX_ROW_BYTES, not_utf8, too_long
from snakechat.workflow.errors import InputError

# Rows may have megabytes: the batches are small so that memory stays bounded.
ROWS_AT_A_TIME = 64
# A file may decode to this many times its size, or to MAX_DECODED_BYTES if that is more.
MAX_EXPANSION = 1000
MAX_DECODED_BYTES = 1 << 30
# Marks the end of an arrow stream. Without it, whole batches may be missing.
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
# Types of pages in the thrift definition of parquet.
DICTIONARY_PAGE = 2


def read_parquet(path: Path, columns: Collection[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Read the rows of a parquet file, in batches whose size is bounded before they are decoded."""
    # Not read_table, which parses "a=b" in a path as a partition. The options avoid reading whole
    # row groups ahead.
    file = pq.ParquetFile(path, buffer_size=1 << 16, pre_buffer=False)
    selected = _select_columns(path, file.schema_arrow.names, columns)
    rows = _rows_per_batch(path, file.metadata, selected)
    return _rows_of(file.iter_batches(rows, columns=selected, use_threads=False), path)


def _rows_per_batch(path: Path, metadata: Any, selected: Collection[str]) -> int:
    """Return the number of rows whose cells probably have at most MAX_BATCH_BYTES.

    Estimated by the average size of rows, and by the size of dictionaries: each row may have the
    largest text of its dictionary, which is in the file only once.
    """
    largest = 1
    with path.open("rb") as file:
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            chunks = [group.column(index) for index in range(group.num_columns)]
            chunks = [
                chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in selected
            ]
            size = sum(max(0, chunk.total_uncompressed_size) for chunk in chunks)
            dictionary = max((_dictionary_bytes(file, chunk) for chunk in chunks), default=0)
            largest = max(largest, size // max(1, group.num_rows), dictionary)
    return min(ROWS_AT_A_TIME, max(1, MAX_BATCH_BYTES // largest))


def _dictionary_bytes(file: IO[bytes], chunk: Any) -> int:
    """Return the bytes of the dictionary of a column chunk, decompressed; 0 if it has none.

    From the header of its first page, which the reader of arrow goes by too. The header starts with
    the type and the decompressed size, each as a byte and a number (compact protocol of thrift).
    """
    if not chunk.has_dictionary_page:
        return 0
    file.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
    header = file.read(16)
    numbers: list[int] = []
    position = 0
    while len(numbers) < 2 and position < len(header):
        # The byte of the field.
        position += 1
        number = shift = 0
        while position < len(header):
            byte = header[position]
            number |= (byte & 0x7F) << shift
            shift, position = shift + 7, position + 1
            if byte < 0x80:
                break
        # Zigzag encoding of signed numbers.
        numbers.append(number >> 1 if not number & 1 else -(number + 1 >> 1))
    if len(numbers) < 2 or numbers[0] != DICTIONARY_PAGE:
        return 0
    return max(0, numbers[1])


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
            f"{missing_hint(missing[-1])}"
        )
    return [name for name in names if name in required or name == TOOLS]


def _rows_of(batches: Iterable[Any], path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rows of batches.

    Raises:
        MemoryError: The cells of the file have so many bytes that it must be a decompression bomb.
    """
    number = decoded = 0
    limit = max(MAX_DECODED_BYTES, MAX_EXPANSION * path.stat().st_size)
    for batch in batches:
        decoded += (size := _decoded_bytes(batch))
        if decoded > limit:
            raise MemoryError
        rows = None
        if size <= MAX_ROW_BYTES:
            with suppress(ValueError, OverflowError):
                rows = batch.to_pylist()
        if rows is None:
            # Convert row by row to find the bad ones.
            rows = (_row_of(batch.slice(index, 1)) for index in range(batch.num_rows))
        for row in rows:
            number += 1
            yield number, row


def _row_of(batch: Any) -> Any:
    if _decoded_bytes(batch) > MAX_ROW_BYTES:
        return too_long()
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return not_utf8(error.object[error.start : error.start + 20])
    # Dates outside Python's range.
    except (ValueError, OverflowError) as error:
        return BadRow(f"{error}")


def _decoded_bytes(batch: Any) -> int:
    """Return the number of bytes of the cells of a batch."""
    return sum(map(_array_bytes, batch.columns))


def _array_bytes(array: Any) -> int:
    """Return the number of bytes of an array, with each entry of a dictionary as often as used."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        dictionary = array.dictionary
        if not (pa.types.is_binary(dictionary.type) or pa.types.is_string(dictionary.type)):
            # Numbers, or entries that are as long in any case.
            return int(dictionary.nbytes // max(1, len(dictionary)) * len(array))
        lengths = pc.binary_length(dictionary).take(array.indices)
        return int(pc.sum(lengths).as_py() or 0)
    if kind.num_fields and _has_dictionary(kind):
        parts = array.flatten()
        return sum(map(_array_bytes, parts)) if isinstance(parts, list) else _array_bytes(parts)
    return int(array.nbytes)


def _has_dictionary(kind: Any) -> bool:
    """Return whether a nested type contains a dictionary."""
    fields = (kind.field(index).type for index in range(kind.num_fields))
    return any(pa.types.is_dictionary(inner) or _has_dictionary(inner) for inner in fields)
