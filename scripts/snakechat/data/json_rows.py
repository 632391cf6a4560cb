"""Rows of jsonl, jsonl.gz and json files."""

import gzip
import json
import re
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, TextIO

from snakechat.data.dataset_files import kind_of
from snakechat.data.row_bounds import (
    MAX_ROW_BYTES,
    InvalidJson,
    checked_row,
    not_utf8,
    row_of_json,
    too_long,
)
from snakechat.workflow.errors import InputError

BOM = b"\xef\xbb\xbf"
# Characters of an array that are read at once; less than a row may have.
CHUNK = 4 << 20
NOT_SPACE = re.compile(r"[^ \t\n\r]")
# What can end an item of an array, outside of a list or object and within one; and what can end a
# text.
ITEM_TOKEN, NESTED_TOKEN = re.compile(r'["\[\]{},]'), re.compile(r'["\[\]{}]')
TEXT_TOKEN = re.compile(r'"|\\(.?)', re.DOTALL)


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
        return row_of_json(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return not_utf8(error.object[error.start : error.start + 20])


def read_json(path: Path, columns: Collection[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Read an array of objects, or one object per line: such files are often named .json too.

    Raises:
        InputError: The file is neither.
        EOFError: The array has no end.
        ValueError: Something else than a comma separates the items, or text follows the array.
    """
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(BOM).lstrip()
    if start.startswith(b"["):
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            yield from enumerate(_Array(text), start=1)
        return
    if isinstance(next((row for _, row in read_lines(path)), None), InvalidJson):
        raise InputError(f"{path}: expected an array of objects or one object per line")
    yield from read_lines(path)


class _Array:
    """The items of a JSON array, without holding more than one of them.

    An item that is complete in memory is decoded at once. Where that fails, its end is found by
    counting brackets, so that the items after it can be read.
    """

    def __init__(self, file: TextIO) -> None:
        self.file = file
        # Characters that have been read, and the position of the first that has not been used.
        self.text, self.start = "", 0
        self.decode = json.JSONDecoder().raw_decode

    def __iter__(self) -> Iterator[Any]:
        self._take("[")
        if self._next() == "]":
            self._take("]")
        else:
            yield self._item()
            while self._next() == ",":
                self._take(",")
                yield self._item()
            self._take("]")
        if self._next():
            raise ValueError(f"text after the end of the array: {self._next()!r}")

    def _next(self) -> str:
        """Skip white space; return the next character, or an empty text at the end."""
        while not (match := NOT_SPACE.search(self.text, self.start)):
            self.start = len(self.text)
            if not self._read():
                return ""
        self.start = match.start()
        return match[0]

    def _take(self, expected: str) -> None:
        found = self._next()
        if not found:
            raise EOFError("the end of the array is missing")
        if found != expected:
            raise ValueError(f"expected {expected!r}, found {found!r}")
        self.start += 1

    def _read(self) -> bool:
        """Read more characters; return whether there are any."""
        chunk = self.file.read(CHUNK)
        self.text, self.start = self.text[self.start :] + chunk, 0
        return bool(chunk)

    def _item(self) -> Any:
        """Return the next item, or a BadRow in its place."""
        first = self._next()
        if first in ("", ",", "]", "}"):
            raise ValueError(f"expected an item, found {first!r}")
        if first != "{":
            # The first digits of a number would be a number too.
            return self._item_by_brackets()
        try:
            row, end = self.decode(self.text, self.start)
        except (ValueError, RecursionError):
            # Invalid, outside of the bounds, or incomplete in memory.
            return self._item_by_brackets()
        item = self.text[self.start : end]
        self.start = end
        return not_unicode(item) or checked_row(row, item)

    def _item_by_brackets(self) -> Any:
        """Return the next item of any length, or a BadRow in its place."""
        item = "".join(self._pieces())
        if len(item) > MAX_ROW_BYTES:
            return too_long()
        return not_unicode(item) or row_of_json(item)

    def _pieces(self) -> Iterator[str]:
        """Yield the text of the next item in pieces, up to some more than the limit."""
        depth = size = 0
        in_text = escaped = False
        position = self.start
        while True:
            token = TEXT_TOKEN if in_text else NESTED_TOKEN if depth else ITEM_TOKEN
            match = token.search(self.text, position + escaped)
            if not match:
                escaped = escaped and position == len(self.text)
                size += len(self.text) - self.start
                if size <= MAX_ROW_BYTES + CHUNK:
                    yield self.text[self.start :]
                self.start = position = len(self.text)
                if not self._read():
                    raise EOFError("the file ends within a row")
                position = 0
                continue
            character, position = match[0], match.end()
            # The character after a backslash at the end of a chunk is in the next one.
            escaped = character == "\\"
            if in_text:
                in_text = character != '"'
            elif character == '"':
                in_text = True
            elif character in "[{":
                depth += 1
            elif depth and character in "]}":
                depth -= 1
            elif not depth:
                if character == "}":
                    raise ValueError("expected ',' or ']', found '}'")
                yield self.text[self.start : position - 1]
                self.start = position - 1
                return


def not_unicode(text: str) -> Any:
    """Return a BadRow if bytes of a text were not UTF-8 (surrogateescape), otherwise None."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        piece = error.object[error.start : error.start + 20]
        return not_utf8(piece.encode("utf-8", "surrogateescape"))
    return None
