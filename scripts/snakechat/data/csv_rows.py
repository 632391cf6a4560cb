"""Rows of csv files."""

import csv
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TextIO

from snakechat.data.formats import BadRow
from snakechat.data.row_bounds import MAX_ROW_BYTES, not_utf8, too_long


def read_csv(path: Path, _: Collection[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Read rows with the columns of the header. Text that is not UTF-8 makes its row a bad one.

    Raises:
        csv.Error: A quotation mark is at a wrong place or has no end.
    """
    # The default is 128 KiB per cell.
    csv.field_size_limit(MAX_ROW_BYTES)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = _Rows(file)
        columns = next(rows, [])
        if columns is None:
            raise csv.Error(f"the header: {too_long()}")
        for number, cells in enumerate((cells for cells in rows if cells != []), start=1):
            yield number, _row_of(columns, cells)


def _row_of(columns: list[str], cells: list[str] | None) -> Any:
    if cells is None:
        return too_long()
    if len(cells) != len(columns):
        return BadRow(f"{len(cells)} cells, the header has {len(columns)} columns")
    try:
        "".join(cells).encode("utf-8")
    except UnicodeEncodeError as error:
        return not_utf8(error.object[error.start : error.start + 20])
    return dict(zip(columns, cells, strict=True))


class _TooLong(Exception):
    """A row exceeds the limit."""


class _Rows:
    """The cells of each row; None in place of a row that exceeds the limit."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.reader = csv.reader(self._lines(), strict=True)
        # Characters and quotation marks of the row.
        self.size = self.quotes = 0

    def __iter__(self) -> "_Rows":
        return self

    def __next__(self) -> list[str] | None:
        self.size = self.quotes = 0
        try:
            return next(self.reader)
        except _TooLong:
            # The generator of lines has ended with its exception.
            self.reader = csv.reader(self._lines(), strict=True)
            return None

    def _lines(self) -> Iterator[str]:
        """Yield lines, with their ends. Raises _TooLong within a row that exceeds the limit."""
        while line := self.file.readline(MAX_ROW_BYTES + 1):
            self.size += len(line)
            if self.size > MAX_ROW_BYTES:
                self._skip(line)
                raise _TooLong
            self.quotes += line.count('"')
            yield line

    def _skip(self, line: str) -> None:
        """Read up to the end of a row: the end of a line outside of quotation marks.

        Raises:
            csv.Error: The row has no end.
        """
        quotes = self.quotes + line.count('"')
        while quotes % 2 or not line.endswith(("\n", "\r")):
            line = self.file.readline(MAX_ROW_BYTES)
            if not line:
                if quotes % 2:
                    raise csv.Error("a quotation mark has no end")
                return
            quotes += line.count('"')
