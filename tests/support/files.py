"""Source files of every kind from rows."""

import bz2
import csv
import gzip
import io
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq


def as_jsonl(rows):
    """Return one JSON object per line."""
    # Most tools do not escape texts.
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_zst(rows):
    """Return compressed JSON lines in two frames, as tools that append write them."""
    codec = pa.Codec("zstd")
    return b"".join(
        codec.compress(as_jsonl(part), asbytes=True) for part in (rows[:1], rows[1:]) if part
    )


def as_csv(rows, delimiter=","):
    """Return CSV with a header."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def as_table(rows):
    """Return a table of rows; a table is returned as it is."""
    return rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)


def as_parquet(rows, **options):
    """Return a Parquet file; pyarrow.parquet.write_table gets the options."""
    file = io.BytesIO()
    pq.write_table(as_table(rows), file, **options)
    return file.getvalue()


def as_arrow(rows):
    """Return an Arrow stream of batches, as written by datasets.save_to_disk."""
    file, table = io.BytesIO(), as_table(rows)
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=100)
    return file.getvalue()


KINDS = {
    "jsonl": as_jsonl,
    "jsonl.gz": lambda rows: gzip.compress(as_jsonl(rows), mtime=0),
    "jsonl.zst": as_zst,
    "ndjson": as_jsonl,
    "json": lambda rows: json.dumps(rows, indent=1, ensure_ascii=False).encode(),
    "json.xz": lambda rows: lzma.compress(json.dumps(rows).encode()),
    "csv": as_csv,
    "csv.bz2": lambda rows: bz2.compress(as_csv(rows)),
    "tsv": lambda rows: as_csv(rows, "\t"),
    "parquet": as_parquet,
    "arrow": as_arrow,
}


def write(path, rows):
    """Write rows into a file; the extension determines the kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name.partition("?")[0]
    kind = next(kind for kind in KINDS if name.endswith(f".{kind}"))
    path.write_bytes(KINDS[kind](rows))
