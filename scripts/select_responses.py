"""Select generated responses by their scores as the records of a dataset.

Writes what import_dataset writes: train.parquet, eval.parquet and stats.json.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from snakechat.data.cells import DroppedRow
from snakechat.data.dialogues import Record, render_response, response_content
from snakechat.data.ragged_arrays import SPLITS
from snakechat.data.records import ScoredPrompt, read_scored_responses, write_records
from snakechat.workflow.job import Job, run


def main(job: Job[SimpleNamespace]) -> None:
    """Write the records of both splits; count dropped prompts."""
    settings = job.settings

    def selected(path: Path) -> Iterator[Record | str]:
        for scored in read_scored_responses(path):
            try:
                yield select_record(
                    scored, settings.select, settings.min_score, settings.min_margin
                )
            except DroppedRow as reason:
                yield str(reason)

    write_records(
        job,
        {split: selected(job.inputs["scores"] / f"{split}.parquet") for split in SPLITS},
        "generate more responses (num_generations), or lower min_score and min_margin",
    )


def select_record(
    scored: ScoredPrompt, select: str, min_score: float | None, min_margin: float
) -> Record:
    """Return the record that is selected from the responses to a prompt.

    Responses that did not end are never selected: they would end in the middle of a sentence.
    Neither are responses without a score. Of equal scores, the first one is selected.

    Args:
        scored: The prompt with its responses.
        select: `best` for the best response as chosen; `best_and_worst` for a pair.
        min_score: Score that the best response must have; None for any.
        min_margin: Difference of the scores that a pair must have; it must always be above 0.

    Raises:
        DroppedRow: No response or no pair meets these conditions.
    """
    ended = [row for row, has_ended in enumerate(scored.ended) if has_ended]
    if not ended:
        raise DroppedRow("no response ended")
    judged = [row for row in ended if not math.isnan(scored.scores[row])]
    if not judged:
        raise DroppedRow("no response has a score")
    best = max(judged, key=lambda row: scored.scores[row])
    worst = min(judged, key=lambda row: scored.scores[row])
    if min_score is not None and scored.scores[best] < min_score:
        raise DroppedRow("score below min_score")
    texts = (response_content(scored.responses[row]) for row in (best, worst))
    chosen, rejected = map(render_response, texts)
    if select == "best":
        return scored.prompt, chosen, None
    margin = scored.scores[best] - scored.scores[worst]
    if margin == 0:
        raise DroppedRow("equal scores")
    if margin < min_margin:
        raise DroppedRow("difference of scores below min_margin")
    return scored.prompt, chosen, rejected


if __name__ == "__main__":
    run(main)
