"""Rows of jsonl, jsonl.gz and json files.

Bytes that are not UTF-8 are kept as surrogates, so that only their row is a bad one.
"""

import gzip
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TextIO

from snakechat.data.cells import BadRow
from snakechat.data.dataset_files import kind_of
from snakechat.workflow.errors import InputError

BOM = b"\xef\xbb\xbf"
# Characters of an array that are read at once.
CHUNK = 4 << 20
# Characters of an item of an array: each chunk of a long one decodes it from its start again.
MAX_ITEM = 16 << 20
SPACE = " \t\n\r"
# What follows an item of an array.
SEPARATOR = re.compile(rf"[{SPACE}]*([\],])[{SPACE}]*")


def read_lines(path: Path, _: Collection[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Read one object per line; empty lines are skipped but counted."""
    file: Any = (gzip.open if kind_of(path) == "jsonl.gz" else open)(path, "rb")
    with file:
        # Bytes split at \n only: U+2028 is text.
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _row_of_line(line.removeprefix(BOM))


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
        if separator and separator.end() - start <= MAX_ITEM:
            yield item
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
