"""Records: the turns of the prompt, chosen and rejected of each row, in a parquet file.

The prompt is a list of {"role", "content"}; chosen and rejected are texts or null, as Record in
snakechat.data.dialogues has them. The column `digest` identifies a row by its texts:
scripts/find_row.py searches it. A column that a dataset keeps for reward functions follows as
kept_NAME, with cells in JSON. Files are written and read one row group at a time, so that a dataset
need not fit into memory.

The prompts of RLHF are also kept as text, for reward functions and for reward models with another
tokenizer: SPLIT.texts.parquet has a row for each row of the ragged array of prompts, with `prompt`,
its turns, and kept_NAME for each column that a dataset of the blend keeps; null where a dataset
does not have the column. Scored responses of a model (SPLIT.parquet) have the columns of SCORED; a
score is NaN where nothing scores a response.
"""

import json
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from snakechat.data.dialogues import Record, Turn, render_prompt
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, write_json

PHASES = ("sft", "reward", "rlhf")
COLUMNS = ("prompt", "chosen", "rejected")
DIGEST = "digest"
KEPT = "kept_"
PROMPT = "prompt"
# A row group ends after as many rows, or after as many bytes of text in memory.
ROWS_AT_A_TIME = 4096
MAX_GROUP_BYTES = 64 << 20
TURNS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
SCORED = pa.schema(
    [
        ("prompt", TURNS),
        ("responses", pa.list_(pa.string())),
        ("ended", pa.list_(pa.bool_())),
        ("scores", pa.list_(pa.float64())),
    ]
)
PERCENTILES = (0, 1, 10, 50, 90, 99, 100)

# The texts of a record: prompt as the template `dialogue` renders it, chosen, rejected.
Texts = tuple[str, str | None, str | None]
# {column: cells} of some records.
Batch = dict[str, list[Any]]


def record_digest(texts: Texts) -> bytes:
    """Return the digest (16 bytes) of the texts of a record; a missing text differs from ""."""
    encoded = [None if text is None else text.encode() for text in texts]
    parts = (b"-1:" if data is None else b"%d:%b" % (len(data), data) for data in encoded)
    return blake2b(b"".join(parts), digest_size=16).digest()


def write_split(
    path: Path, rows: Iterable[tuple[Any, ...] | str], kept: Sequence[str] = ()
) -> dict[str, Any]:
    """Write the records of a split; return the numbers of these, and of dropped ones by reason.

    Of the records, `repeated_prompts` have the prompt of an earlier one.

    Args:
        rows: Records, each followed by its kept cells; a dropped one is its reason.
        kept: Names of the columns that records keep.
    """
    schema = pa.schema(
        [
            ("prompt", TURNS),
            *((name, pa.string()) for name in ("chosen", "rejected")),
            (DIGEST, pa.binary(16)),
            *((f"{KEPT}{name}", pa.string()) for name in kept),
        ]
    )
    dropped, prompts, size = Counter[str](), array("Q"), 0
    group: list[dict[str, Any]] = []
    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        for row in rows:
            if isinstance(row, str):
                dropped[row] += 1
                continue
            turns, chosen, rejected, *cells = row
            texts = texts_of((turns, chosen, rejected))
            prompts.append(fingerprint(texts[0] or chosen or ""))
            values = (turns, chosen, rejected, record_digest(texts), *cells)
            group.append(dict(zip(schema.names, values, strict=True)))
            size += sum(map(sys.getsizeof, (*texts, *cells)))
            if len(group) == ROWS_AT_A_TIME or size > MAX_GROUP_BYTES:
                file.write_table(pa.Table.from_pylist(group, schema))
                group, size = [], 0
        if group:
            file.write_table(pa.Table.from_pylist(group, schema))
    repeated = len(prompts) - len(np.unique(prompts))
    return {"rows": len(prompts), "repeated_prompts": repeated, "dropped": dict(dropped)}


def read_record_batches(
    path: str | Path, rows: np.ndarray | None = None, columns: Sequence[str] = COLUMNS
) -> Iterator[Batch]:
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


def read_records(path: str | Path, rows: np.ndarray | None = None) -> Iterator[Record]:
    """Yield each record, or the records of the given rows."""
    for batch in read_record_batches(path, rows):
        yield from zip(*(batch[name] for name in COLUMNS), strict=True)


def read_texts(path: str | Path) -> Iterator[Texts]:
    """Yield the texts of each record."""
    return map(texts_of, read_records(path))


def read_digests(path: str | Path) -> list[bytes]:
    """Return the digests of all records of a file."""
    return pq.read_table(path, columns=[DIGEST])[DIGEST].to_pylist()


@contextmanager
def open_prompt_texts(
    folder: Path, split: str, kept: Sequence[str]
) -> Iterator[Callable[[Batch, Sequence[bool]], None]]:
    """Open the texts of a split for writing; yield a function that appends valid rows of a batch.

    kept: Names of the columns that datasets keep.
    """
    schema = pa.schema([(PROMPT, TURNS), *((f"{KEPT}{name}", pa.string()) for name in kept)])
    with pq.ParquetWriter(folder / f"{split}.texts.parquet", schema, compression="zstd") as file:

        def write(records: Batch, is_valid: Sequence[bool]) -> None:
            nothing = [None] * len(is_valid)
            table = pa.table({name: records.get(name, nothing) for name in schema.names}, schema)
            file.write_table(table.filter(list(is_valid)))

        yield write


class PromptTexts:
    """The texts of a split, by row number. They are read when the first one is needed."""

    def __init__(self, folder: Path, split: str) -> None:
        self.path = folder / f"{split}.texts.parquet"

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
        return self.table.column(name).take(pa.array(rows, pa.int64())).to_pylist()


def fingerprint(text: str) -> int:
    """Return a 64-bit hash of a text without the whitespace around it."""
    return int.from_bytes(blake2b(text.strip().encode(), digest_size=8).digest())


def percentiles(lengths: np.ndarray) -> dict[str, float]:
    """Return the mean and percentiles ("p50") of lengths, of which there is one at least."""
    values = np.percentile(lengths, PERCENTILES, method="nearest")
    summary = {f"p{name}": int(value) for name, value in zip(PERCENTILES, values, strict=True)}
    return summary | {"mean": round(float(np.mean(lengths)), 1)}


def write_records(
    job: Job[Any],
    splits: Mapping[str, Iterable[tuple[Any, ...] | str]],
    advice: str = "",
    kept: Sequence[str] = (),
) -> None:
    """Write SPLIT.parquet of each split, and stats.json; record sizes and dropped rows.

    Args:
        splits: The rows of each split as in write_split.
        advice: What to do if no row is left, which is an error.
        kept: Names of the columns that records keep.
    """
    stats = {}
    for split, found in splits.items():
        stats[split] = write_split(job.result / f"{split}.parquet", found, kept)
        rows, dropped = stats[split]["rows"], stats[split]["dropped"]
        if not rows:
            raise InputError(
                f"datasets.{job.spec['name']}: the {split} split has no rows left of"
                f" {sum(dropped.values()):,} (dropped: {dropped}){advice and f': {advice}'}"
            )
        print(f"{job.spec['name']}: {rows:,} rows in split {split}")
    job.facts |= {
        "dropped": {split: dict(sorted(each["dropped"].items())) for split, each in stats.items()},
        "size": {split: {"rows": each["rows"]} for split, each in stats.items()},
    }
    write_json(job.result / "stats.json", stats)


# --- the rows of each phase -------------------------------------------------------------------


def phase_sizes(rows: int, weights: Sequence[float]) -> list[int]:
    """Return the number of rows of each phase, rounded as in DeepSpeed-Chat.

    The bounds are cumulated round(weight * rows), shifted so that the last bound is `rows`
    (DeepSpeed-Chat, data_utils.py, lines 85-129). In contrast to DeepSpeed-Chat, no bound is
    negative, which would repeat rows, and phases of weight 0 get no rows.
    """
    normalized = np.asarray(weights, dtype=np.float64)
    counts, weighted = np.zeros(len(normalized), dtype=np.int64), normalized > 0
    bounds = np.cumsum([0, *(round(w / normalized.sum() * rows) for w in normalized[weighted])])
    bounds[1:] -= bounds[-1] - rows
    counts[weighted] = np.diff(bounds.clip(min=0))
    return counts.tolist()


def split_rows(groups: np.ndarray, weights: Sequence[float], seed: int) -> list[np.ndarray]:
    """Return the row numbers (int64) of each phase, in the order of a permutation of groups.

    The rows of a group belong to one phase. If each row is a group, phases are consecutive slices
    of DeepSpeed-Chat's permutation.

    Args:
        groups: Group of each row, as a number.
        weights: Relative numbers of groups of the phases.
    """
    # Number groups by first appearance, so that the split does not depend on the values.
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    order = np.arange(len(first), dtype=np.int64)
    np.random.RandomState(seed).shuffle(order)
    place = np.argsort(np.argsort(first)[order])[group]
    rows = np.argsort(place, kind="stable").astype(np.int64)
    bounds = np.cumsum([0, *phase_sizes(len(order), weights)])
    return [rows[start:end] for start, end in pairwise(np.searchsorted(place[rows], bounds))]


def limited_phases(
    phases: Sequence[np.ndarray], removed: np.ndarray, weights: Sequence[float], max_rows: int
) -> list[np.ndarray]:
    """Return the first rows of each phase that are not removed, at most max_rows in all.

    Rows stay in the phase that they have without a limit, and each removed row is replaced by the
    next one of its phase.
    """
    phases = [rows[~np.isin(rows, removed)] for rows in phases]
    if sum(map(len, phases)) <= max_rows:
        return phases
    return [rows[:size] for rows, size in zip(phases, phase_sizes(max_rows, weights), strict=True)]


def removed_rows(
    job: Job[Any], settings: Mapping[str, Any], paths: Mapping[str, Path]
) -> dict[str, np.ndarray]:
    """Return the ascending numbers of the rows of each split that a dataset removes.

    Args:
        settings: The part of the spec that may have `exclude`, digests of rows that must exist.
        paths: The records of each split.
    """
    if "exclude" not in settings:
        return dict.fromkeys(paths, np.empty(0, np.int64))
    excluded, dataset = set(map(bytes.fromhex, settings["exclude"])), dataset_name(job)
    digests = {split: read_digests(path) for split, path in paths.items()}
    if missing := sorted(excluded.difference(*digests.values())):
        raise InputError(
            f"config: datasets.{dataset}.exclude: {missing[0].hex()} is the digest of no row of"
            f" {dataset}: python scripts/find_row.py finds digests"
        )
    rows = {
        split: np.flatnonzero([digest in excluded for digest in found])
        for split, found in digests.items()
    }
    print(f"{dataset}: {sum(map(len, rows.values())):,} rows excluded")
    return rows


def dataset_name(job: Job[Any], records: str = "records") -> str:
    """Return the name of a dataset, for people: it does not determine the result."""
    return job.spec["inputs"][records]["name"]
