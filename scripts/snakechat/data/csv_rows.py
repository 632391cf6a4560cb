"""Rows of csv files."""

import csv
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from snakechat.data.cells import BadRow
from snakechat.data.table_rows import check_names

# Characters of a cell. Python's default is 128 KiB.
MAX_CELL = 16 << 20


def read_csv(path: Path, columns: Collection[str] | None = None) -> Iterator[tuple[int, Any]]:
    """Read rows with the columns of the header.

    Bytes that are not UTF-8 are kept as surrogates, so that only their row is a bad one.

    Raises:
        csv.Error: A quotation mark is at a wrong place or has no end, or a cell is too long.
        InputError: The header has one of the columns to read twice.
    """
    csv.field_size_limit(MAX_CELL)
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        names = next(reader, [])
        check_names(path, [name for name in names if name in (columns or ())])
        for number, cells in enumerate(filter(None, reader), start=1):
            if len(cells) == len(names):
                yield number, dict(zip(names, cells, strict=True))
            else:
                yield (
                    number,
                    BadRow(f"{len(cells)} cells, the header has {len(names)} columns"),
                )
