"""Rows of source files: parquet, arrow, jsonl, json, csv and tsv, of which text may be compressed.

A few rows are held at a time. The datasets library does not read them, because it loses what
tests/unit/data/test_sources.py requires: the row number of a bad row, memory bounds for a json
array (1.2 GB for a file of 130 MB), and texts that look like numbers or dates. Bytes of text that
are not UTF-8 are kept as surrogates, so that only their row is a bad one.
"""

import csv
import io
import json
import lzma
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from snakechat.data.cells import CONTEXT, MEDIA, BadRow, parse_json
from snakechat.data.dataset_files import checked_kind, kind_of
from snakechat.data.dialogues import TOOLS
from snakechat.data.formats import MISSING
from snakechat.data.model_files import is_pointer
from snakechat.workflow.errors import InputError

# Row number from 1, and the row: a dict, or a BadRow in its place.
Rows = Iterator[tuple[int, Any]]

# Rows may have megabytes: the batches are small so that memory stays bounded.
ROWS_AT_A_TIME = 64
# Marks the end of an arrow stream. Without it, whole batches may be missing.
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
# The start of an Arrow file, which has its batches at positions.
ARROW_FILE = b"ARROW1"
BOM, UTF16 = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
# Opens a file of bytes as text.
_text_of = partial(io.TextIOWrapper, encoding="utf-8-sig", errors="surrogateescape", newline="")
# Characters of an array that are read at once.
CHUNK = 4 << 20
# Characters of an item of an array, of which each chunk decodes a long one from its start again,
# and of a cell of csv, for which Python's default is 128 KiB.
MAX_ITEM = MAX_CELL = 16 << 20
SPACE = " \t\n\r"
# What follows an item of an array.
SEPARATOR = re.compile(rf"[{SPACE}]*([\],])[{SPACE}]*")
# The first bytes of compressed files. Names do not decide: browsers decompress what they download.
COMPRESSIONS: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": partial(pa.input_stream, compression="gzip"),
    b"BZh": partial(pa.input_stream, compression="bz2"),
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": partial(pa.input_stream, compression="zstd"),
    b"\x04\x22\x4d\x18": partial(pa.input_stream, compression="lz4"),
}
# What the readers raise for a file that does not have the format of its name; UnicodeDecodeError is
# a ValueError.
DAMAGES = (
    pa.ArrowException,
    csv.Error,
    lzma.LZMAError,
    EOFError,
    OSError,
    ValueError,
    RecursionError,
)


def read_rows(path: str | Path, columns: Collection[str] | None = None) -> Rows:
    """Yield the number, from 1, of each row of a file, and the row or a BadRow in its place.

    columns: Columns, or paths into them, to read; defaults to all. Only parquet and arrow skip the
        others.

    Raises:
        InputError: The file is damaged or truncated, is of an unknown kind, or lacks rows or one of
            the columns.
    """
    path, number = Path(path), 0
    if is_pointer(path):
        raise InputError(f"{path}: a Git LFS pointer instead of the file: run git lfs pull")
    try:
        for number, row in READERS[checked_kind(path)](path, columns):
            if not isinstance(row, (dict, BadRow)):
                row = BadRow(f"is {type(row).__name__}, expected an object with columns")
            yield number, row
    except MemoryError:
        # Arrow's exception is an ArrowException, too.
        raise
    except DAMAGES as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{path}: damaged or truncated after row {number} ({path.stat().st_size} bytes):"
            f" {reason}"
        ) from None
    if not number:
        raise InputError(f"{path}: no rows")


# --- tables ---------------------------------------------------------------------------------


def _read_parquet(path: Path, columns: Collection[str] | None) -> Rows:
    # Not read_table, which parses "a=b" in a path as a partition. The options avoid reading whole
    # row groups ahead.
    file = pq.ParquetFile(path, buffer_size=1 << 16, pre_buffer=False)
    selected = _select_columns(path, file.schema_arrow.names, columns)
    return _rows_of(file.iter_batches(ROWS_AT_A_TIME, columns=selected, use_threads=False))


def _read_arrow(path: Path, columns: Collection[str] | None) -> Rows:
    """Read record batches: a stream, as the datasets library saves them, or an Arrow file."""
    with pa.memory_map(str(path)) as file:
        is_stream = file.read(len(ARROW_FILE)) != ARROW_FILE
        file.seek(0)
        table: Any = pa.ipc.open_stream(file) if is_stream else pa.ipc.open_file(file)
        batches = table if is_stream else map(table.get_batch, range(table.num_record_batches))
        yield from _rows_of(_slices(batches, _select_columns(path, table.schema.names, columns)))
        if is_stream:
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
    """Return the names of the columns to read: also tools, system, history, images and the like."""
    if columns is None:
        return names
    required = {column if column in names else column.split(".")[0] for column in columns}
    if missing := sorted(required - set(names)):
        raise InputError(
            f"{path}: column {', '.join(missing)} is missing; the file has {', '.join(names)}:"
            f" {MISSING}"
        )
    others = {name for name in names if name in (TOOLS, *CONTEXT) or MEDIA.fullmatch(name)}
    selected = [name for name in names if name in required | others]
    _check_names(path, selected)
    return selected


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Raise InputError if a file has two columns of a name: a row would keep one of them."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{path}: column {twice[0]} occurs twice: rename one of them")


def _rows_of(batches: Iterable[Any]) -> Rows:
    return enumerate(chain.from_iterable(map(_rows_of_batch, batches)), start=1)


def _rows_of_batch(batch: Any) -> list[Any]:
    try:
        return batch.to_pylist()
    # Overflow: of dates outside Python's range.
    except (ValueError, OverflowError) as error:
        if batch.num_rows > 1:
            # Row by row, to find the bad ones.
            parts = (batch.slice(index, 1) for index in range(batch.num_rows))
            return [row for part in parts for row in _rows_of_batch(part)]
        if isinstance(error, UnicodeDecodeError):
            text = error.object[error.start : error.start + 20]
            return [BadRow(f"text that is not UTF-8: {text!r}")]
        return [BadRow(str(error))]


# --- text -----------------------------------------------------------------------------------


def _open_bytes(path: Path) -> io.BufferedReader:
    """Open a file that may be compressed, whatever its name says."""
    with path.open("rb") as plain:
        start = plain.read(6)
    for magic, opener in COMPRESSIONS.items():
        if start.startswith(magic):
            return io.BufferedReader(opener(path))
    if start.startswith(UTF16):
        raise InputError(f"{path}: text in UTF-16: save the file as text in UTF-8")
    if b"\0" in start and kind_of(path.stem):
        raise ValueError("expected a compressed file")
    return path.open("rb")


def _rows_of_lines(file: BinaryIO) -> Rows:
    """Yield one object per line; empty lines are skipped but counted."""
    # Bytes split at \n only: U+2028 is text.
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield number, _parsed(line.removeprefix(BOM).decode("utf-8", "surrogateescape"))


def _parsed(text: str) -> Any:
    """Return the value of a text, or a BadRow if it is not JSON."""
    try:
        return parse_json(text)
    except BadRow as error:
        return error


def _read_json(path: Path, _: Collection[str] | None, only_lines: bool = False) -> Rows:
    """Read an array of objects, or one object per line: such files are often named .json too.

    Neither is, for example, an object over several lines with the rows in it.
    """
    with _open_bytes(path) as file:
        is_array = not only_lines and file.peek(1).removeprefix(BOM).lstrip().startswith(b"[")
        rows = enumerate(_items(_text_of(file)), start=1) if is_array else _rows_of_lines(file)
        for index, (number, row) in enumerate(rows):
            if not (index or only_lines) and str(row).startswith("invalid JSON: E"):
                raise InputError(f"{path}: expected an array of objects or one object per line")
            yield number, row


def _items(file: TextIO) -> Iterator[Any]:
    """Yield the items of a JSON array, of which a few megabytes are held at a time.

    An invalid item is a ValueError, or a RecursionError if it is nested too deeply: the start of
    the next item is unknown.
    """
    decoder = json.JSONDecoder()
    # Characters that have been read, and the position of the first that has not been used.
    text, start = file.read(CHUNK).partition("[")[2].lstrip(SPACE), 0
    end = 1 if text.startswith("]") else 0
    while not end:
        problem = "',' or ']' is missing"
        try:
            # Where the item ends.
            _, stop = decoder.raw_decode(text, start)
            separator = SEPARATOR.match(text, stop)
        except json.JSONDecodeError as error:
            problem, separator = error.msg, None
        if separator:
            yield _parsed(text[start:stop])
            start = separator.end()
            end = start if separator[1] == "]" else 0
            continue
        # The item is invalid, too long, or not yet read to its end.
        chunk = file.read(CHUNK)
        if not chunk or len(text) - start > MAX_ITEM:
            raise ValueError(
                f"an item is invalid or longer than {MAX_ITEM:,} characters: {problem}"
            )
        text, start = (text[start:] + chunk).lstrip(SPACE), 0
    if any(rest.strip(SPACE) for rest in chain([text[end:]], iter(partial(file.read, CHUNK), ""))):
        raise ValueError("text follows the array")


def _read_csv(path: Path, columns: Collection[str] | None, delimiter: str = ",") -> Rows:
    """Read rows with the columns of the header; misplaced quotation marks are errors."""
    csv.field_size_limit(MAX_CELL)
    with _open_bytes(path) as data, _text_of(data) as file:
        reader = csv.reader(file, strict=True, delimiter=delimiter)
        names = next(reader, [])
        _check_names(path, [name for name in names if name in (columns or ())])
        for number, cells in enumerate(filter(None, reader), start=1):
            if cells[0].startswith("\ufeff"):
                row: Any = BadRow(
                    "starts with a byte-order mark, as where files were joined: remove the mark"
                )
            elif len(cells) != len(names):
                row = BadRow(f"{len(cells)} cells, the header has {len(names)} columns")
            else:
                row = dict(zip(names, cells, strict=True))
            yield number, row


READERS: dict[str, Callable[[Path, Collection[str] | None], Rows]] = {
    "parquet": _read_parquet,
    "arrow": _read_arrow,
    "jsonl": partial(_read_json, only_lines=True),
    "json": _read_json,
    "csv": _read_csv,
    "tsv": partial(_read_csv, delimiter="\t"),
}
