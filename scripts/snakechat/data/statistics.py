"""Statistics of datasets: lengths, duplicates, and prompts that two sets share."""

import json
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from snakechat.data.dialogues import MARKER, Turn, is_empty, render_prompt
from snakechat.data.records import read_records
from snakechat.workflow.job import Job

PERCENTILES = (0, 1, 10, 50, 90, 99, 100)


def fingerprint(text: str) -> int:
    """Return a 64-bit hash of a text without the whitespace around it."""
    return int.from_bytes(blake2b(text.strip().encode(), digest_size=8).digest())


def percentiles(lengths: Sequence[int] | np.ndarray) -> dict[str, float]:
    """Return the mean and percentiles ("p50") of lengths; {} if there are none."""
    if not len(lengths):
        return {}
    values = np.percentile(lengths, PERCENTILES, method="nearest")
    summary = {f"p{name}": int(value) for name, value in zip(PERCENTILES, values, strict=True)}
    return summary | {"mean": round(float(np.mean(lengths)), 1)}


class DatasetStatistics:
    """Accumulate statistics of records."""

    def __init__(self) -> None:
        self.lengths = {name: array("l") for name in ("prompt", "chosen", "rejected")}
        self.prompts, self.rows = array("Q"), array("Q")
        self.counts = dict.fromkeys(
            (
                "empty_prompt",
                "empty_response",
                "equal_responses",
                "turns_in_response",
                "chosen_longer",
            ),
            0,
        )

    def add(self, turns: list[Turn], chosen: str | None, rejected: str | None) -> None:
        """Add a record."""
        prompt = render_prompt(turns)
        responses = [response for response in (chosen, rejected) if response is not None]
        self.lengths["prompt"].append(len(prompt))
        if chosen is not None:
            self.lengths["chosen"].append(len(chosen))
        self.prompts.append(fingerprint(prompt))
        self.rows.append(fingerprint("\0".join([prompt, *responses])))
        counts = self.counts
        counts["empty_prompt"] += is_empty(turns)
        counts["empty_response"] += any(not response.strip() for response in responses)
        counts["turns_in_response"] += any(MARKER.search(response) for response in responses)
        if chosen is not None and rejected is not None:
            self.lengths["rejected"].append(len(rejected))
            counts["equal_responses"] += chosen.strip() == rejected.strip()
            counts["chosen_longer"] += len(chosen) > len(rejected)

    def summary(self) -> dict[str, Any]:
        """Return the statistics as JSON values. Lengths are in characters."""
        rows, pairs = len(self.prompts), len(self.lengths["rejected"])
        counts = dict(self.counts)
        chosen_longer = counts.pop("chosen_longer")
        summary: dict[str, Any] = {
            "rows": rows,
            "pairs": pairs,
            "characters": {
                name: percentiles(lengths) for name, lengths in self.lengths.items() if lengths
            },
            "repeated_prompts": rows - len(np.unique(self.prompts)),
            "repeated_rows": rows - len(np.unique(self.rows)),
            **counts,
        }
        if pairs:
            summary["chosen_longer_share"] = round(chosen_longer / pairs, 4)
        return summary

    def characters(self) -> int:
        """Return the number of characters of all texts."""
        return sum(map(sum, self.lengths.values()))


def count_shared(prompts: np.ndarray, others: np.ndarray) -> int:
    """Return how many of the prompts occur in `others`; both are fingerprints, one per row."""
    return int(np.isin(np.asarray(prompts), np.asarray(others)).sum())


def write_statistics(job: Job[Any]) -> None:
    """Write stats.json with statistics of the records of each split, and record their sizes.

    job.facts already has the dropped rows.
    """
    stats = {}
    for path in sorted(job.result.glob("*.parquet")):
        statistics = DatasetStatistics()
        for record in read_records(path):
            statistics.add(*record)
        size = {"rows": len(statistics.prompts), "characters": statistics.characters()}
        job.facts.setdefault("size", {})[path.stem] = size
        stats[path.stem] = statistics.summary() | {"dropped": job.facts["dropped"][path.stem]}
        print(f"{job.spec['name']}: {stats[path.stem]['rows']:,} rows in split {path.stem}")
    (job.result / "stats.json").write_text(json.dumps(stats, indent=1, sort_keys=True) + "\n")
