"""Label the pairs of a dataset by an LLM judge, which compares the responses in both orders.

The better response becomes the chosen one. A pair is dropped and counted if it is a tie, where
neither is better or the verdict depends on the order, or if a reply is unreadable.

Writes what import_dataset writes: train.parquet, eval.parquet and stats.json.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq

from snakechat.algorithms.llm_judge import load_judges, record_usage
from snakechat.data.dialogues import SPLITS, Record, render_prompt
from snakechat.data.records import (
    limited_phases,
    read_records,
    removed_rows,
    split_rows,
    write_records,
)
from snakechat.workflow.errors import in_batches
from snakechat.workflow.job import Job, run

# Pairs that are compared at a time.
BATCH_SIZE = 256


def main(job: Job[SimpleNamespace]) -> None:
    """Write the labelled records of both splits; count swapped and dropped pairs."""
    settings = job.settings
    judge = load_judges(job)[settings.llm_judge]
    swapped = job.facts["swapped"] = dict.fromkeys(SPLITS, 0)
    paths = {split: job.inputs["records"] / f"{split}.parquet" for split in SPLITS}
    removed = removed_rows(job, vars(settings), paths)

    def pairs(split: str, path: Path) -> Iterator[Record | str]:
        number = pq.read_metadata(path).num_rows
        drawn = split_rows(np.arange(number), [1], settings.seed)
        rows = np.sort(limited_phases(drawn, removed[split], [1], settings.max_rows or number)[0])
        for batch in in_batches(split, "rows", len(rows), BATCH_SIZE):
            records = list(read_records(path, rows[batch]))
            found = [(p, a, b) for p, a, b in records if a is not None and b is not None]
            yield from ["no pair"] * (len(records) - len(found))
            if not found:
                continue
            prompts, first, second = zip(*found, strict=True)
            outcomes, _ = judge.compare(list(map(render_prompt, prompts)), first, second)
            swapped[split] += int((outcomes == 0).sum())
            for (prompt, one, other), outcome in zip(found, outcomes, strict=True):
                if outcome == 1:
                    yield prompt, one, other
                elif outcome == 0:
                    yield prompt, other, one
                else:
                    yield "tie" if outcome == 0.5 else "unreadable reply"
        print(f"{split}: {len(rows):,} pairs, {swapped[split]:,} swapped")

    write_records(
        job,
        {split: pairs(split, path) for split, path in paths.items()},
        "use another judge or rubric, or more rows",
    )
    record_usage(job, [judge])


if __name__ == "__main__":
    run(main)
