"""Rows of jsonl, jsonl.gz and json files.

Bytes that are not UTF-8 are kept as surrogates, so that only their row is a bad one.
"""

import gzip
import json
import re
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, TextIO

from snakechat.data.cells import BadRow
from snakechat.data.dataset_files import kind_of
from snakechat.data.row_bounds import MAX_ROW_BYTES, too_long
from snakechat.workflow.errors import InputError

BOM = b"\xef\xbb\xbf"
# Characters of an array that are read at once.
CHUNK = 4 << 20
SPACE = " \t\n\r"
# What follows an item of an array.
SEPARATOR = re.compile(rf"[{SPACE}]*([\],])[{SPACE}]*")


def open_lines(path: Path) -> IO[bytes]:
    """Open a file, compressed or not, for reading bytes."""
    file: Any = (gzip.open if kind_of(path) == "jsonl.gz" else open)(path, "rb")
    return file


def read_lines(path: Path, _: Collection[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Read one object per line; empty lines are skipped but counted."""
    with open_lines(path) as file:
        # Bytes split at \n only: U+2028 is text.
        for number, line in enumerate(_bounded_lines(file), start=1):
            if line is None:
                yield number, too_long()
            elif line.strip():
                yield number, _row_of_line(line.removeprefix(BOM))


def _bounded_lines(file: IO[bytes]) -> Iterator[bytes | None]:
    """Yield the lines of a file; None in place of one that exceeds the limit."""
    for line in iter(partial(file.readline, MAX_ROW_BYTES + 1), b""):
        if len(line) <= MAX_ROW_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_ROW_BYTES)
        yield None


def _row_of_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8", "surrogateescape"))
    except RecursionError:
        return BadRow("nested too deeply")
    except json.JSONDecodeError as error:
        found = error.doc[error.pos : error.pos + 20] or error.doc[:20]
        return BadRow(f"invalid JSON: {error}, found {found!r}")
    except ValueError as error:
        return BadRow(f"invalid JSON: {error}")


def read_json(path: Path, columns: Collection[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Read an array of objects, or one object per line: such files are often named .json too.

    Raises:
        InputError: The file is neither.
        ValueError: As _items.
    """
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(BOM).lstrip()
    if start.startswith(b"["):
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            yield from enumerate(_items(text), start=1)
        return
    if isinstance(next((row for _, row in read_lines(path)), None), BadRow):
        raise InputError(f"{path}: expected an array of objects or one object per line")
    yield from read_lines(path)


def _items(file: TextIO) -> Iterator[Any]:
    """Yield the items of a JSON array, of which a few megabytes are held at a time.

    Raises:
        ValueError: Text follows the array, or an item is invalid, too long or nested too deeply:
            nothing tells where the next one starts.
    """
    decode = json.JSONDecoder().raw_decode
    # Characters that have been read, and the position of the first that has not been used.
    text, start = file.read(CHUNK).partition("[")[2].lstrip(SPACE), 0
    end = 1 if text.startswith("]") else 0
    while not end:
        problem = "',' or ']' is missing"
        try:
            item, stop = decode(text, start)
            separator = SEPARATOR.match(text, stop)
        except RecursionError:
            raise ValueError("an item is nested too deeply") from None
        except json.JSONDecodeError as error:
            problem, separator = error.msg, None
        if separator and separator.end() - start <= MAX_ROW_BYTES:
            yield item
            start = separator.end()
            end = start if separator[1] == "]" else 0
            continue
        # The item is invalid, too long, or not yet read to its end.
        chunk = file.read(CHUNK)
        if not chunk or len(text) - start > MAX_ROW_BYTES:
            bound = f"{MAX_ROW_BYTES:,} bytes"
            raise ValueError(f"an item is invalid or longer than {bound}: {problem}")
        text, start = (text[start:] + chunk).lstrip(SPACE), 0
    rest = text[end:]
    while rest:
        if rest.strip(SPACE):
            raise ValueError("text follows the array")
        rest = file.read(CHUNK)
