"""Scored responses of a model (SPLIT.parquet), and the records that are selected from them."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from snakechat.data.cells import DroppedRow
from snakechat.data.dialogues import Turn, render_response, response_content
from snakechat.data.formats import Record
from snakechat.data.records import TURNS, turns_of

SCHEMA = pa.schema(
    [
        ("prompt", TURNS),
        ("responses", pa.list_(pa.string())),
        ("ended", pa.list_(pa.bool_())),
        ("scores", pa.list_(pa.float64())),
    ]
)


class ScoredPrompt(NamedTuple):
    """The turns of a prompt, its responses, whether each of them ended, and their scores.

    A score is NaN where nothing scores a response.
    """

    prompt: list[Turn]
    responses: list[str]
    ended: list[bool]
    scores: list[float]


@contextmanager
def open_scored_responses(path: Path) -> Iterator[Callable[[Sequence[ScoredPrompt]], None]]:
    """Open a file for writing; yield a function that appends prompts."""
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as file:

        def write(prompts: Sequence[ScoredPrompt]) -> None:
            rows = [prompt._asdict() for prompt in prompts]
            file.write_table(pa.Table.from_pylist(rows, SCHEMA))

        yield write


def read_scored_responses(path: Path) -> Iterator[ScoredPrompt]:
    """Yield the prompts of a file in their order."""
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        for row in file.read_row_group(group).to_pylist():
            yield ScoredPrompt(**row)._replace(prompt=turns_of(row["prompt"]))


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
