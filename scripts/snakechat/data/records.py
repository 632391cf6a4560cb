"""Records: the turns of the prompt, chosen and rejected of each row, in a parquet file.

The prompt is a list of {"role", "content"}; chosen and rejected are texts. rejected is null in
datasets without pairs, and chosen in those without responses; a single response that is labelled
good is chosen, one that is labelled bad is rejected. A text that is no dialogue is chosen, and its
prompt is empty. The column `digest` identifies a row by its
texts: scripts/find_row.py searches it. A column that a dataset keeps for reward functions follows
as kept_NAME, with cells in JSON. Files are written and read one row group at a time, so that a
dataset need not fit into memory.

The prompts of RLHF are also kept as text, for reward functions and for reward models with another
tokenizer: SPLIT.texts.parquet has a row for each row of the ragged array of prompts, with `prompt`,
its turns, and kept_NAME for each column that a dataset of the blend keeps; null where a dataset
does not have the column.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from snakechat.data.dialogues import Turn, render_prompt
from snakechat.data.formats import Record

COLUMNS = ("prompt", "chosen", "rejected")
DIGEST = "digest"
KEPT = "kept_"
PROMPT = "prompt"
# A row group ends after as many rows, or after as many bytes of text in memory.
ROWS_AT_A_TIME = 4096
MAX_GROUP_BYTES = 64 << 20
TURNS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))

# The texts of a record: prompt as the template `dialogue` renders it, chosen, rejected.
Texts = tuple[str, str | None, str | None]


def record_digest(texts: Texts) -> bytes:
    """Return the digest (16 bytes) of the texts of a record; a missing text differs from ""."""
    hashed = blake2b(digest_size=16)
    for text in texts:
        data = b"" if text is None else text.encode()
        hashed.update(b"%d:" % (-1 if text is None else len(data)) + data)
    return hashed.digest()


class RecordWriter:
    """Write records one by one; a context manager. len() is the number of records written.

    kept: Names of the columns that each record keeps.
    """

    def __init__(self, path: str | Path, kept: Sequence[str] = ()) -> None:
        columns = [("prompt", TURNS), ("chosen", pa.string()), ("rejected", pa.string())]
        columns += [(DIGEST, pa.binary(16)), *((f"{KEPT}{name}", pa.string()) for name in kept)]
        self.schema = pa.schema(columns)
        self.file = pq.ParquetWriter(path, self.schema, compression="zstd")
        self.rows: list[tuple[Any, ...]] = []
        self.written = self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._flush()
        self.file.close()

    def __len__(self) -> int:
        return self.written + len(self.rows)

    def write(self, record: Record, *kept: str) -> None:
        """Append a record and its kept cells."""
        texts = texts_of(record)
        self.rows.append((*record, record_digest(texts), *kept))
        self.size += sum(map(sys.getsizeof, (*texts, *kept)))
        if len(self.rows) == ROWS_AT_A_TIME or self.size > MAX_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self.rows:
            cells = zip(self.schema.types, zip(*self.rows, strict=True), strict=True)
            columns = [pa.array(column, kind) for kind, column in cells]
            self.file.write_table(pa.Table.from_arrays(columns, schema=self.schema))
            self.written += len(self.rows)
            self.rows, self.size = [], 0


def read_record_batches(
    path: str | Path, rows: np.ndarray | None = None, columns: Sequence[str] = COLUMNS
) -> Iterator[dict[str, list[Any]]]:
    """Yield records in the order of the file, as {column: cells} of up to one row group.

    Args:
        rows: Ascending row numbers to read; a repeated number repeats its record. Defaults to all.
        columns: Columns to read; those that the file does not have are skipped.
    """
    start = 0
    # Read row groups one by one: iter_batches would read ahead.
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            batch = file.read_row_group(group, columns=list(columns), use_threads=False)
            if rows is not None:
                first, last = np.searchsorted(rows, [start, start + batch.num_rows])
                wanted = rows[first:last] - start
                start += batch.num_rows
                batch = batch.take(pa.array(wanted))
            if batch.num_rows:
                cells = batch.to_pydict()
                if "prompt" in cells:
                    cells["prompt"] = list(map(turns_of, cells["prompt"]))
                yield cells


def turns_of(messages: list[dict[str, str]]) -> list[Turn]:
    """Return the turns of a cell of the type TURNS."""
    return [(message["role"], message["content"]) for message in messages]


def texts_of(record: Record) -> Texts:
    """Return the texts of a record."""
    turns, chosen, rejected = record
    return render_prompt(turns), chosen, rejected


def kept_columns(path: str | Path) -> list[str]:
    """Return the names of the columns that the records of a file keep."""
    names = pq.read_schema(path).names
    return [name.removeprefix(KEPT) for name in names if name.startswith(KEPT)]


def read_records(path: str | Path, rows: np.ndarray | None = None) -> Iterator[Record]:
    """Yield each record, or those of the given rows."""
    for batch in read_record_batches(path, rows):
        yield from zip(*(batch[name] for name in COLUMNS), strict=True)


def read_texts(path: str | Path) -> Iterator[Texts]:
    """Yield the texts of each record."""
    return map(texts_of, read_records(path))


def read_digests(path: str | Path) -> list[bytes]:
    """Return the digests of all records of a file."""
    return pq.read_table(path, columns=[DIGEST])[DIGEST].to_pylist()


def texts_path(folder: Path, split: str) -> Path:
    """Return the file with the texts of a split."""
    return folder / f"{split}.texts.parquet"


@contextmanager
def open_prompt_texts(
    folder: Path, split: str, kept: Sequence[str]
) -> Iterator[Callable[[dict[str, list[Any]], Sequence[bool]], None]]:
    """Open the texts of a split for writing; yield a function that appends records.

    The function takes a batch of records, and for each of them whether it is valid. Invalid ones
    are skipped.

    kept: Names of the columns that datasets keep.
    """
    columns = [(PROMPT, TURNS), *((f"{KEPT}{name}", pa.string()) for name in kept)]
    schema = pa.schema(columns)
    with pq.ParquetWriter(texts_path(folder, split), schema, compression="zstd") as file:

        def write(records: dict[str, list[Any]], is_valid: Sequence[bool]) -> None:
            nothing = [None] * len(is_valid)
            table = pa.table({name: records.get(name, nothing) for name in schema.names}, schema)
            file.write_table(table.filter(list(is_valid)))

        yield write


class PromptTexts:
    """The texts of a split, by row number. They are read when the first one is needed."""

    def __init__(self, folder: Path, split: str) -> None:
        self.path = texts_path(folder, split)

    @cached_property
    def table(self) -> pa.Table:
        """All texts. A table needs less memory than a list of Python texts."""
        return pq.read_table(self.path)

    def prompts(self, rows: Sequence[int] | np.ndarray) -> list[str]:
        """Return the texts of prompts, as the template `dialogue` renders them."""
        return list(map(render_prompt, self.turns(rows)))

    def turns(self, rows: Sequence[int] | np.ndarray) -> list[list[Turn]]:
        """Return the turns of prompts."""
        return list(map(turns_of, self._cells(PROMPT, rows)))

    def columns(self, rows: Sequence[int] | np.ndarray) -> dict[str, list[Any]]:
        """Return the kept cells of prompts by column; None where a dataset has no such column."""
        return {
            name.removeprefix(KEPT): [text and json.loads(text) for text in self._cells(name, rows)]
            for name in self.table.column_names
            if name.startswith(KEPT)
        }

    def _cells(self, name: str, rows: Sequence[int] | np.ndarray) -> list[Any]:
        cells: list[Any] = self.table.column(name).take(pa.array(rows, pa.int64())).to_pylist()
        return cells
