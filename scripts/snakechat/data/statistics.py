"""Statistics of datasets: rows, repeated prompts, and prompts that two sets share."""

import json
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import numpy as np

from snakechat.data.dialogues import render_prompt
from snakechat.data.formats import Record
from snakechat.data.records import read_records
from snakechat.workflow.job import Job

PERCENTILES = (0, 1, 10, 50, 90, 99, 100)


def fingerprint(text: str) -> int:
    """Return a 64-bit hash of a text without the whitespace around it."""
    return int.from_bytes(blake2b(text.strip().encode(), digest_size=8).digest())


def percentiles(lengths: np.ndarray) -> dict[str, float]:
    """Return the mean and percentiles ("p50") of lengths, of which there is one at least."""
    values = np.percentile(lengths, PERCENTILES, method="nearest")
    summary = {f"p{name}": int(value) for name, value in zip(PERCENTILES, values, strict=True)}
    return summary | {"mean": round(float(np.mean(lengths)), 1)}


def dataset_statistics(records: Iterable[Record]) -> dict[str, Any]:
    """Return the number of records, and of those whose prompt an earlier one has.

    With pairs, also the share of them whose chosen response is the longer one.
    """
    prompts, is_longer = array("Q"), array("b")
    for turns, chosen, rejected in records:
        prompts.append(fingerprint(render_prompt(turns) or chosen or ""))
        if chosen is not None and rejected is not None:
            is_longer.append(len(chosen) > len(rejected))
    summary: dict[str, Any] = {"rows": len(prompts)}
    summary["repeated_prompts"] = len(prompts) - len(np.unique(prompts))
    if is_longer:
        summary["chosen_longer_share"] = round(sum(is_longer) / len(is_longer), 4)
    return summary


def write_statistics(job: Job[Any]) -> None:
    """Write stats.json with statistics of the records of each split, and record their sizes.

    job.facts already has the dropped rows.
    """
    stats = {}
    for path in sorted(job.result.glob("*.parquet")):
        stats[path.stem] = dataset_statistics(read_records(path))
        rows = stats[path.stem]["rows"]
        job.facts.setdefault("size", {})[path.stem] = {"rows": rows}
        stats[path.stem]["dropped"] = job.facts["dropped"][path.stem]
        print(f"{job.spec['name']}: {rows:,} rows in split {path.stem}")
    (job.result / "stats.json").write_text(json.dumps(stats, indent=1, sort_keys=True) + "\n")
