"""Rows of json, jsonl, csv and tsv files, which may be compressed.

Bytes that are not UTF-8 are kept as surrogates, so that only their row is a bad one.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import pyarrow as pa

from snakechat.data.cells import BadRow, JsonDecoder, check_names, parse_json
from snakechat.data.dataset_files import kind_of
from snakechat.workflow.errors import InputError

BOM = b"\xef\xbb\xbf"
# Characters of an array that are read at once.
CHUNK = 4 << 20
# Characters of an item of an array: each chunk of a long one decodes it from its start again.
MAX_ITEM = 16 << 20
# Characters of a cell of csv. Python's default is 128 KiB.
MAX_CELL = 16 << 20
SPACE = " \t\n\r"
# What follows an item of an array.
SEPARATOR = re.compile(rf"[{SPACE}]*([\],])[{SPACE}]*")
# The first bytes of compressed files. Names do not decide: browsers decompress what they download.
COMPRESSIONS: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": lambda path: pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"),
    b"\x04\x22\x4d\x18": lambda path: pa.CompressedInputStream(pa.OSFile(str(path)), "lz4"),
}


def open_bytes(path: Path) -> io.BufferedReader:
    """Open a file that may be compressed.

    Raises:
        InputError: The text is in UTF-16.
        ValueError: The name says that the file is compressed, and it is neither that nor text.
    """
    with path.open("rb") as plain:
        start = plain.read(6)
    openers = [opener for magic, opener in COMPRESSIONS.items() if start.startswith(magic)]
    if not openers and b"\0" in start and kind_of(path.stem):
        raise ValueError("expected a compressed file")
    file = io.BufferedReader(openers[0](path)) if openers else path.open("rb")
    # UTF-16 of ASCII has a zero in each pair of bytes, with a byte-order mark or without one.
    if re.match(rb"\xff\xfe|\xfe\xff|[^\0]\0[^\0]\0|\0[^\0]\0[^\0]", file.peek(4)[:4]):
        file.close()
        raise InputError(f"{path}: text in UTF-16: save the file as text in UTF-8")
    return file


def read_lines(path: Path, _: Collection[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Read one object per line; empty lines are skipped but counted."""
    with open_bytes(path) as file:
        yield from _rows_of_lines(file)


def _rows_of_lines(file: BinaryIO) -> Iterator[tuple[int, Any]]:
    # Bytes split at \n only: U+2028 is text.
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                row = parse_json(line.removeprefix(BOM).decode("utf-8", "surrogateescape"))
            except ValueError as error:
                row = BadRow(f"invalid JSON: {error}")
            yield number, row


def read_json(path: Path, _: Collection[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Read an array of objects, or one object per line: such files are often named .json too.

    Raises:
        InputError: The file is neither.
        ValueError: As _items.
    """
    with open_bytes(path) as file:
        if file.peek(1).removeprefix(BOM).lstrip().startswith(b"["):
            text = io.TextIOWrapper(
                file, encoding="utf-8-sig", errors="surrogateescape", newline=""
            )
            yield from enumerate(_items(text), start=1)
            return
        for index, (number, row) in enumerate(_rows_of_lines(file)):
            if index == 0 and isinstance(row, BadRow) and row.reason.startswith("invalid JSON: E"):
                raise InputError(f"{path}: expected an array of objects or one object per line")
            yield number, row


def _items(file: TextIO) -> Iterator[Any]:
    """Yield the items of a JSON array, of which a few megabytes are held at a time.

    Raises:
        ValueError: Text follows the array, or an item is invalid, too long or nested too deeply:
            nothing tells where the next one starts.
    """
    decoder = JsonDecoder()
    # Characters that have been read, and the position of the first that has not been used.
    text, start = file.read(CHUNK).partition("[")[2].lstrip(SPACE), 0
    end = 1 if text.startswith("]") else 0
    while not end:
        problem = "',' or ']' is missing"
        try:
            item, stop = decoder.raw_decode(text, start)
            separator = SEPARATOR.match(text, stop)
        except RecursionError:
            raise ValueError("an item is nested too deeply") from None
        except json.JSONDecodeError as error:
            problem, separator = error.msg, None
        if separator and separator.end() - start <= MAX_ITEM:
            yield BadRow(decoder.problem) if decoder.problem else item
            start = separator.end()
            end = start if separator[1] == "]" else 0
            continue
        # The item is invalid, too long, or not yet read to its end.
        chunk = file.read(CHUNK)
        if not chunk or len(text) - start > MAX_ITEM:
            raise ValueError(f"an item is invalid or longer than {MAX_ITEM:,} bytes: {problem}")
        text, start = (text[start:] + chunk).lstrip(SPACE), 0
    rest = text[end:]
    while rest:
        if rest.strip(SPACE):
            raise ValueError("text follows the array")
        rest = file.read(CHUNK)


def read_csv(
    path: Path, columns: Collection[str] | None = None, delimiter: str = ","
) -> Iterator[tuple[int, Any]]:
    """Read rows with the columns of the header.

    Raises:
        csv.Error: A quotation mark is at a wrong place or has no end, or a cell is too long.
        InputError: The header has one of the columns to read twice.
    """
    csv.field_size_limit(MAX_CELL)
    with (
        open_bytes(path) as data,
        io.TextIOWrapper(data, "utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
        reader = csv.reader(file, strict=True, delimiter=delimiter)
        names = next(reader, [])
        check_names(path, [name for name in names if name in (columns or ())])
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
