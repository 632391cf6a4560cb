"""The page of a report that shows responses of all models to the same prompts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snakechat.evaluation.comparisons import initial_model
from snakechat.reporting.labels import RESPONSES
from snakechat.reporting.pages import write_page
from snakechat.reporting.results import model_label

# Prompts on the page: the first ones, and those where the score decreased most.
FIRST, DECREASED = 10, 3

Line = dict[str, Any]


def write_responses(path: Path, name: str, lines: Sequence[Line], num_generations: int) -> None:
    """Write a page with the first response of each model to some prompts.

    Args:
        path: HTML file to write.
        name: Name of the RLHF recipe.
        lines: The lines of responses.jsonl; responses to the same prompt follow each other.
        num_generations: Responses of each model to each prompt.
    """
    responses: dict[str, list[Line]] = {}
    for line in lines:
        responses.setdefault(line["model"], []).append(line)
    responses = {model: found[::num_generations] for model, found in responses.items()}
    score_keys = [key for key in ("score", "judge_score") if key in lines[0]]

    def question(row: int) -> dict[str, Any]:
        """Return a prompt and the responses to it."""
        return {
            "prompt": responses["rlhf"][row]["prompt"].strip(),
            "responses": [
                {
                    "model": model_label(model),
                    "text": found[row]["response"].strip(),
                    "scores": [found[row][key] for key in score_keys],
                }
                for model, found in responses.items()
            ],
        }

    write_page(
        path,
        "report_responses.html",
        language="en",
        title=f"{name}: responses side by side",
        initial=model_label(initial_model(responses)),
        score_labels=[RESPONSES[key] for key in score_keys],
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
