"""The page of a report that shows responses of all models to the same prompts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snakechat.evaluation.comparisons import initial_model
from snakechat.reporting.html_pages import write_html
from snakechat.reporting.labels import RESPONSES
from snakechat.reporting.results import model_label
from snakechat.reporting.translations import translator

# Prompts on the page: the first ones, and those where the score decreased most.
FIRST, DECREASED = 10, 3

Line = dict[str, Any]


def write_responses(
    path: Path, language: str, lines: Sequence[Line], num_generations: int, **header: Any
) -> None:
    """Write a page with the first response of each model to some prompts.

    Args:
        path: HTML file to write.
        lines: The lines of responses.jsonl; responses to the same prompt follow each other.
        num_generations: Responses of each model to each prompt.
        header: The header of the page (write_html).
    """
    translate = translator(language)
    responses: dict[str, list[Line]] = {}
    for line in lines:
        responses.setdefault(line["model"], []).append(line)
    responses = {model: found[::num_generations] for model, found in responses.items()}
    score_keys = [key for key in ("score", "judge_score") if key in lines[0]]
    initial = model_label(initial_model(responses), translate)

    def question(row: int) -> dict[str, Any]:
        """Return a prompt and the responses to it, with marks of the highest and lowest score."""
        scores = [found[row].get("score") for found in responses.values()]
        known = [score for score in scores if score is not None]
        ends = (max(known), min(known)) if len(set(known)) > 1 else (None, None)
        return {
            "prompt": responses["rlhf"][row]["prompt"].strip(),
            "responses": [
                {
                    "model": model_label(model, translate),
                    "text": found[row]["response"].strip(),
                    "scores": [found[row][key] for key in score_keys],
                    "rank": "winner"
                    if score is not None and score == ends[0]
                    else "loser"
                    if score is not None and score == ends[1]
                    else "",
                }
                for (model, found), score in zip(responses.items(), scores, strict=True)
            ],
        }

    write_html(
        path,
        "report_responses.html",
        language,
        **header,
        initial=initial,
        score_labels=[translate(RESPONSES[key]) for key in score_keys],
        first=[question(row) for row in range(min(FIRST, len(responses["rlhf"])))],
        decreased=[question(row) for row in largest_decreases(responses)],
    )


def largest_decreases(responses: dict[str, list[Line]]) -> list[int]:
    """Return the rows where the score decreased most by RLHF, the largest decrease first."""
    initial = initial_model(responses)
    changes = [
        after["score"] - before["score"]
        for after, before in zip(responses["rlhf"], responses[initial], strict=True)
    ]
    rows = sorted(range(len(changes)), key=changes.__getitem__)
    return [row for row in rows if changes[row] < 0][:DECREASED]
