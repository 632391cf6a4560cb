"""Source files of every kind: written, read, damaged."""

import gzip

import pytest

from snakechat.data.cells import BadRow
from snakechat.data.sources import read_rows
from snakechat.workflow.errors import InputError
from support.files import KINDS, as_jsonl

# One object per line in a file named .json, too.
WRITERS = {f"rows.{kind}": writer for kind, writer in KINDS.items()} | {"lines.json": as_jsonl}
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
