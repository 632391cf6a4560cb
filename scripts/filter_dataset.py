"""Find the rows of a dataset that its filters remove: train.npy and eval.npy with their numbers.

Nothing is removed here: split_dataset does so after the split, so that all other rows stay in their
phases. filtered.jsonl has the digest of each of the rows, never its text, and stats.json the
numbers by filter. The eval split comes first: of duplicates in both splits, that in the train split
is removed.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pyarrow.parquet as pq
from tqdm import tqdm

from snakechat.data.records import read_records, record_digest
from snakechat.data.row_filters import Filter, make_filters
from snakechat.data.tokens import save_array
from snakechat.workflow.errors import InputError
from snakechat.workflow.external_files import planned_files
from snakechat.workflow.job import Job, run


def main(job: Job) -> None:
    """Find the rows of both splits."""
    words = Path(job.placement["words"]) if "words" in job.placement else None
    evaluation_sets = {
        name: job.inputs[f"against.{name}"] for name in getattr(job.settings, "decontaminate", ())
    }
    with planned_files({words: job.spec["files"]["words"]} if words else {}):
        filters = make_filters(vars(job.settings), words, evaluation_sets)
    paths = {split: job.inputs["records"] / f"{split}.parquet" for split in ("eval", "train")}
    stats: dict[str, dict[str, Any]] = {}
    with (job.result / "filtered.jsonl").open("w") as listing:
        for split, path in paths.items():
            if path.exists():
                stats[split] = filter_split(job, split, path, filters, listing)
    job.facts["filtered"] = {split: of["removed"] for split, of in stats.items()}
    (job.result / "stats.json").write_text(json.dumps(stats, indent=1, sort_keys=True) + "\n")


def filter_split(
    job: Job, split: str, path: Path, filters: Mapping[str, Filter], listing: TextIO
) -> dict[str, Any]:
    """Write SPLIT.npy and list its rows; return the number of rows, and of those of each filter.

    Raises:
        InputError: No rows are left.
    """
    name, rows = job.spec["name"], pq.read_metadata(path).num_rows
    removed = dict.fromkeys(filters, 0)
    numbers = []
    records = tqdm(read_records(path), f"filter {split}", rows, unit="row", mininterval=2)
    for number, record in enumerate(records):
        for kind, reason in filters.items():
            if (because := reason(record)) is not None:
                removed[kind] += 1
                numbers.append(number)
                digest = record_digest(record).hex()
                entry = {"split": split, "row": number, "digest": digest, "filter": kind}
                listing.write(json.dumps(entry | ({"of": because} if because else {})) + "\n")
                break
    counts = ", ".join(f"{kind} {count:,}" for kind, count in removed.items())
    if len(numbers) == rows:
        raise InputError(
            f"datasets.{name}.filters: the {split} split has no rows left of {rows:,} ({counts}):"
            " relax a filter"
        )
    print(f"{name}: {len(numbers):,} of {rows:,} {split} rows removed: {counts}")
    save_array(job.result / f"{split}.npy", np.array(numbers, np.int64))
    return {"rows": rows, "removed": removed}


if __name__ == "__main__":
    run(main)
