"""Records: prompt, chosen and rejected of each row, as text in a parquet file.

rejected is null in sets that have responses but no pairs. Files are written and read some rows at a
time: no set has to fit into memory.
"""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = ("prompt", "chosen", "rejected")
SCHEMA = pa.schema([(name, pa.string()) for name in COLUMNS])
ROWS_AT_A_TIME = 4096


class RecordWriter:
    """Writes records one by one; a context manager. len() is the number written."""

    def __init__(self, path):
        self.file = pq.ParquetWriter(path, SCHEMA, compression="zstd")
        self.rows = []
        self.written = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._flush()
        self.file.close()

    def __len__(self):
        return self.written + len(self.rows)

    def write(self, record):
        """record: (prompt, chosen, rejected or None)."""
        self.rows.append(record)
        if len(self.rows) == ROWS_AT_A_TIME:
            self._flush()

    def _flush(self):
        if self.rows:
            columns = [pa.array(cells, pa.string()) for cells in zip(*self.rows, strict=True)]
            self.file.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))
            self.written += len(self.rows)
            self.rows = []


def read_record_batches(path, rows=None):
    """Yield {column: list of cells} of some records after the other, in the file's order.

    rows: ascending row numbers of those wanted, repeated where one is wanted more than once; all
    by default.
    """
    start = 0
    # One row group after the other, as they were written: iter_batches would read ahead.
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


def read_records(path, rows=None):
    """Yield (prompt, chosen, rejected) of each record, or of these rows, as in record_batches."""
    for batch in read_record_batches(path, rows):
        yield from zip(*(batch[name] for name in COLUMNS), strict=True)
