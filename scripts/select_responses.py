"""Select generated responses by their scores as the records of a dataset.

Writes what import_dataset writes: train.parquet, eval.parquet and stats.json.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from snakechat.data.dialogues import SPLITS, Record, render_response, response_content
from snakechat.data.records import SCORED, read_record_batches, write_records
from snakechat.workflow.job import Job, run


def main(job: Job[SimpleNamespace]) -> None:
    """Write the records of both splits; count dropped prompts."""
    settings = job.settings
    arguments = settings.select, settings.min_score, settings.min_margin

    def selected(path: Path) -> Iterator[Record | str]:
        for batch in read_record_batches(path, columns=SCORED.names):
            for cells in zip(*batch.values(), strict=True):
                yield select_record(dict(zip(batch, cells, strict=True)), *arguments)

    write_records(
        job,
        {split: selected(job.inputs["scores"] / f"{split}.parquet") for split in SPLITS},
        "generate more responses (num_generations), or lower min_score and min_margin",
    )


def select_record(
    scored: Mapping[str, Any], select: str, min_score: float | None, min_margin: float
) -> Record | str:
    """Return the record that is selected from the responses to a prompt, or why there is none.

    Responses that did not end are never selected: they would end in the middle of a sentence.
    Neither are responses without a score. Of equal scores, the first one is selected.

    Args:
        scored: A row of scored responses.
        select: `best` for the best response as chosen; `best_and_worst` for a pair, whose scores
            must differ by min_margin, and must not be equal.
        min_score: The least score of the best response, if any.
    """
    ended = [row for row, has_ended in enumerate(scored["ended"]) if has_ended]
    if not ended:
        return "no response ended"
    judged = {row: scored["scores"][row] for row in ended if not math.isnan(scored["scores"][row])}
    if not judged:
        return "no response has a score"
    best, worst = max(judged, key=judged.__getitem__), min(judged, key=judged.__getitem__)
    if min_score is not None and judged[best] < min_score:
        return "score below min_score"
    chosen, rejected = (
        render_response(response_content(scored["responses"][row])) for row in (best, worst)
    )
    if select == "best":
        return scored["prompt"], chosen, None
    margin = judged[best] - judged[worst]
    if margin == 0:
        return "equal scores"
    if margin < min_margin:
        return "difference of scores below min_margin"
    return scored["prompt"], chosen, rejected


if __name__ == "__main__":
    run(main)
