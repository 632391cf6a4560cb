"""Records: the prompt, chosen and rejected texts of each row, in a parquet file.

rejected is null in datasets without pairs. Files are written and read one row group at a time, so
that a dataset need not fit into memory.
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from snakechat.data.formats import Record

COLUMNS = ("prompt", "chosen", "rejected")
SCHEMA = pa.schema([(name, pa.string()) for name in COLUMNS])
ROWS_AT_A_TIME = 4096


class RecordWriter:
    """Write records one by one; a context manager. len() is the number of records written."""

    def __init__(self, path: str | Path) -> None:
        self.file = pq.ParquetWriter(path, SCHEMA, compression="zstd")
        self.rows: list[Record] = []
        self.written = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._flush()
        self.file.close()

    def __len__(self) -> int:
        return self.written + len(self.rows)

    def write(self, record: Record) -> None:
        """Append a record: (prompt, chosen, rejected or None)."""
        self.rows.append(record)
        if len(self.rows) == ROWS_AT_A_TIME:
            self._flush()

    def _flush(self) -> None:
        if self.rows:
            columns = [pa.array(cells, pa.string()) for cells in zip(*self.rows, strict=True)]
            self.file.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))
            self.written += len(self.rows)
            self.rows = []


def read_record_batches(
    path: str | Path, rows: np.ndarray | None = None
) -> Iterator[dict[str, list[str | None]]]:
    """Yield records in the order of the file, as {column: cells} of up to one row group.

    rows: Ascending row numbers to read; a repeated number repeats its record. Defaults to all rows.
    """
    start = 0
    # Read row groups one by one: iter_batches would read ahead.
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        batch = file.read_row_group(group, columns=list(COLUMNS), use_threads=False)
        if rows is not None:
            first, last = np.searchsorted(rows, [start, start + batch.num_rows])
            wanted = rows[first:last] - start
            start += batch.num_rows
            batch = batch.take(pa.array(wanted))
        if batch.num_rows:
            yield batch.to_pydict()


def read_records(path: str | Path, rows: np.ndarray | None = None) -> Iterator[Record]:
    """Yield (prompt, chosen, rejected) of each record, or of the given rows."""
    for batch in read_record_batches(path, rows):
        yield from zip(*(batch[name] for name in COLUMNS), strict=True)
