"""Rows of source files: parquet, arrow, jsonl, json, csv and tsv.

A few rows are held at a time. The datasets library is not used, because it loses what
tests/unit/data/test_sources.py requires: the row number of a bad row, memory bounds for a json
array (1.2 GB for a file of 130 MB), and texts that look like numbers or dates.
"""

import csv
import lzma
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from snakechat.data.cells import BadRow
from snakechat.data.dataset_files import check_kinds, kind_of
from snakechat.data.model_files import LFS_POINTER
from snakechat.data.table_rows import read_arrow, read_parquet, read_saved
from snakechat.data.text_rows import read_csv, read_json, read_lines, read_tsv
from snakechat.workflow.errors import InputError

# Row number from 1, and the row: a dict, or a BadRow in its place.
NumberedRow = tuple[int, Any]

# What the readers raise for a file that does not have the format of its name.
DAMAGES: tuple[type[Exception], ...] = (
    pa.ArrowException,
    csv.Error,
    EOFError,
    OSError,
    lzma.LZMAError,
    zlib.error,
    # Also UnicodeDecodeError.
    ValueError,
    RecursionError,
)


def read_rows(
    path: str | Path, columns: Collection[str] | None = None
) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """Yield the number, from 1, of each row of a file, and the row or a BadRow in its place.

    Args:
        path: A file whose name ends in one of the kinds in READERS, or a folder that
            `datasets.save_to_disk` wrote.
        columns: Columns, or paths into them, to read; defaults to all. Only parquet and arrow skip
            the others.

    Raises:
        InputError: The file is damaged or truncated, is of an unknown kind, or lacks rows or one of
            the columns.
    """
    path, number = Path(path), 0
    reader: Callable[[Path, Collection[str] | None], Iterator[NumberedRow]] = read_saved
    if not path.is_dir():
        check_kinds([path])
        with path.open("rb") as file:
            start = file.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            raise InputError(f"{path}: a Git LFS pointer instead of the file: run git lfs pull")
        reader = READERS[str(kind_of(path))]
    try:
        for number, row in reader(path, columns):
            if not isinstance(row, (dict, BadRow)):
                row = BadRow(f"is {type(row).__name__}, expected an object with columns")
            yield number, row
    except MemoryError:
        # That of Arrow is an ArrowException, too.
        raise
    except DAMAGES as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        size = path.stat().st_size
        raise InputError(
            f"{path}: damaged or truncated after row {number} ({size} bytes): {reason}"
        ) from None
    if not number:
        raise InputError(f"{path}: no rows")


READERS: dict[str, Callable[[Path, Collection[str] | None], Iterator[NumberedRow]]] = {
    "parquet": read_parquet,
    "arrow": read_arrow,
    "jsonl": read_lines,
    "json": read_json,
    "csv": read_csv,
    "tsv": read_tsv,
}
