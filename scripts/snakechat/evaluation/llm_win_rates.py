"""Win rates of a chat model over the model that it started from, by an LLM judge."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from snakechat.algorithms.llm_judge import LlmJudge
from snakechat.evaluation.comparisons import win_rates
from snakechat.evaluation.intervals import clusters_of

# Messages, replies and verdicts, in the result of an evaluation.
LOG = "llm_judge.jsonl"


def llm_win_rates(
    judge: LlmJudge,
    prompts: Sequence[str],
    responses: tuple[Sequence[str], Sequence[str]],
    lengths: tuple[np.ndarray, np.ndarray],
    max_prompts: int,
    folder: Path,
) -> dict[str, Any]:
    """Return the win rates of the first model over the second one, and write the log.

    The judge compares one response of each model to prompts at equal distances, in both orders; a
    tie is half a win. Pairs with an unreadable reply are counted and skipped.

    Args:
        prompts: Texts of the prompts [n].
        responses: The responses of both models [n].
        lengths: Their lengths in tokens [n].
        max_prompts: How many of the prompts are compared at most.

    Raises:
        InputError: The endpoint failed, or no reply is readable.
    """
    number = min(len(prompts), max_prompts)
    rows = np.linspace(0, len(prompts) - 1, number).round().astype(int)
    pairs = ([texts[row] for row in rows] for texts in responses)
    wins, log = judge.compare([prompts[row] for row in rows], *pairs)
    with open(folder / LOG, "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in log)
    readable = ~np.isnan(wins)
    ours = wins[None, readable]
    metrics = [
        {"llm_judge": values, "length": length[None, rows[readable]]}
        for values, length in zip((ours, 1 - ours), lengths, strict=True)
    ]
    num_readable = int(readable.sum())
    clusters = clusters_of(prompts[row] for row in rows[readable])
    rates = win_rates(metrics[0], metrics[1], "llm_judge", clusters)
    return {**rates, "prompts": num_readable, "unreadable": number - num_readable}
