"""Rows as the bytes of source files of every kind."""

import csv
import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq


def as_jsonl(rows, **options):
    """One object a line; options are those of json.dumps."""
    return "".join(json.dumps(row, **options) + "\n" for row in rows).encode()


def as_gz(rows, **options):
    """The same, compressed."""
    return gzip.compress(as_jsonl(rows, **options), mtime=0)


def as_json(rows, **options):
    """An array."""
    return json.dumps(rows, **options).encode()


def as_csv(rows, encoding="utf-8"):
    """A line of names, and one for each row."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode(encoding)


def as_table(rows):
    """Rows, or a table that is there already: one without rows has columns all the same."""
    return rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)


def as_parquet(rows, **options):
    """Options are those of pyarrow.parquet.write_table."""
    file = io.BytesIO()
    pq.write_table(as_table(rows), file, **options)
    return file.getvalue()


def as_arrow(rows, batch=None):
    """A stream, as datasets.save_to_disk writes it."""
    file, table = io.BytesIO(), as_table(rows)
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=batch)
    return file.getvalue()


KINDS = {
    "jsonl": as_jsonl,
    "jsonl.gz": as_gz,
    "json": as_json,
    "csv": as_csv,
    "parquet": as_parquet,
    "arrow": as_arrow,
}


def write(path, rows, **options):
    """Write rows into a file of the kind that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name.partition("?")[0]
    kind = next(kind for kind in KINDS if name.endswith(f".{kind}"))
    path.write_bytes(KINDS[kind](rows, **options))
