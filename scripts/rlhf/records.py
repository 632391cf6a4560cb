"""Records: rows of prompt, chosen and rejected, as text in a parquet file."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf.job import InputError

PHASES = ("sft", "reward", "rlhf")
COLUMNS = ("prompt", "chosen", "rejected")
SCHEMA = pa.schema([(name, pa.string()) for name in COLUMNS])


def _plain(row):
    return row


def _instruct(row):
    """A bare instruction and bare answers."""
    return {
        "prompt": f"\n\nHuman: {row['prompt'].strip()}\n\nAssistant:",
        "chosen": f" {row['chosen'].strip()}",
        "rejected": f" {row['rejected'].strip()}",
    }


def _last_turn(row):
    """A prompt without its last "Assistant:", answers with all that comes before them."""
    return {
        "prompt": f"{row['prompt'].rstrip()}\n\nAssistant:",
        "chosen": row["chosen"].split("Assistant:")[-1],
        "rejected": row["rejected"].split("Assistant:")[-1],
    }


FORMATS = {"plain": _plain, "instruct": _instruct, "last_turn": _last_turn}


def read_source(path, format):
    """Records of one source file, in its order.

    Raises InputError for a file that is no parquet, has no rows, lacks a column, or has a cell
    that is no text.
    """
    try:
        # Not read_table: it takes "a=b" in a path for a partition, and starts threads for it.
        table = pq.ParquetFile(path).read()
    except (pa.ArrowInvalid, OSError) as error:
        size = Path(path).stat().st_size
        raise InputError(
            f"{path}: not a whole parquet file ({size} bytes): {str(error).splitlines()[0]}"
        ) from None
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise InputError(
            f"{path}: no column {', '.join(missing)}; it has {', '.join(table.column_names)}"
        )
    if table.num_rows == 0:
        raise InputError(f"{path}: no rows")
    try:
        rows = table.select(COLUMNS).to_pylist()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: text that is not UTF-8: {error.object[:40]!r}") from None
    for number, row in enumerate(rows):
        for name, cell in row.items():
            if not isinstance(cell, str):
                found = "nothing" if cell is None else type(cell).__name__
                raise InputError(f"{path}: row {number}: {name} is {found}, expected text")
    return [FORMATS[format](row) for row in rows]


def write_records(path, rows):
    """Write records. Raises InputError if there are none."""
    if not rows:
        raise InputError(f"{Path(path).stem}: no rows")
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path, compression="zstd")


def read_records(path, rows=None):
    """Records of a file written by write_records; of these rows, in their order, if given."""
    table = pq.ParquetFile(path).read()
    return (table if rows is None else table.take(pa.array(rows))).to_pylist()


def phase_of_rows(number, weights, seed):
    """Rows of each phase, as DeepSpeed-Chat draws them: disjoint arrays that cover range(number).

    Bounds are cumulated round(share * number), shifted so that the last one is number; they are
    kept in order and from 0 on, where DeepSpeed-Chat can repeat rows (data_utils.py, lines 85-129).
    """
    shares = np.array(weights, dtype=np.float64) / np.sum(weights)
    bounds = np.cumsum([0, *(round(share * number) for share in shares)])
    bounds[1:] -= bounds[-1] - number
    bounds = np.maximum.accumulate(np.clip(bounds, 0, number))
    order = np.arange(number, dtype=np.int64)
    np.random.RandomState(seed).shuffle(order)
    return [order[start:end] for start, end in pairwise(bounds)]
