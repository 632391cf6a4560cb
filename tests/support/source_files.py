"""Source files of every kind: written, read, damaged."""

import gzip
from functools import partial

import pytest

from snakechat.data.cells import BadRow
from snakechat.data.sources import read_rows
from snakechat.workflow.errors import InputError
from support.files import as_arrow, as_csv, as_gz, as_json, as_jsonl, as_parquet

# Most tools do not escape texts.
PLAIN = {"ensure_ascii": False}
WRITERS = {
    "rows.parquet": as_parquet,
    "rows.arrow": partial(as_arrow, batch=100),
    "rows.jsonl": partial(as_jsonl, **PLAIN),
    "rows.jsonl.gz": partial(as_gz, **PLAIN),
    "rows.json": partial(as_json, indent=1, **PLAIN),
    # One object per line in a file named .json.
    "lines.json": partial(as_jsonl, **PLAIN),
    "rows.csv": as_csv,
}
ROW = {"prompt": "\n\nHuman: Can you help?\n\nAssistant:", "chosen": " Of course, I can."}


def numbered(number):
    return [{**ROW, "chosen": f" Response {n}."} for n in range(number)]


def write(folder, name, rows):
    (folder / name).write_bytes(WRITERS[name](rows))
    return folder / name


def put(path, content):
    """Write bytes into a file, compressed if its name ends in .gz."""
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read(path):
    """Return all rows of a file, numbered from 1; a bad row as "bad: reason"."""
    numbers, rows = zip(*read_rows(path), strict=True)
    assert list(numbers) == list(range(1, len(rows) + 1))
    return [f"bad: {row}" if isinstance(row, BadRow) else row for row in rows]


def rows_before_damage(path):
    """Return the rows before damage; the error has their number and the size of the file."""
    rows = []
    with pytest.raises(InputError) as error:
        rows.extend(row for _, row in read_rows(path))
    place = f"damaged or truncated after row {len(rows)} ({path.stat().st_size} bytes): "
    assert str(error.value).startswith(f"{path}: {place}")
    assert "\n" not in str(error.value)
    return rows
