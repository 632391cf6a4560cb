"""Tables of responses of all models to the same prompts."""

from collections.abc import Mapping, Sequence
from typing import Any

from snakechat.evaluation.comparisons import initial_model
from snakechat.reporting.labels import label_of, model_label
from snakechat.reporting.metric_tables import figure_cells
from snakechat.reporting.metric_values import Figure
from snakechat.reporting.page_parts import Section, Table
from snakechat.reporting.translations import translate

# Prompts on the page: the first ones, and those where the score decreased most.
FIRST, DECREASED = 10, 3

# The lines of responses.jsonl of each model: the first response to each prompt.
Responses = Mapping[str, Sequence[dict[str, Any]]]


def response_sections(lines: Sequence[dict[str, Any]], num_generations: int) -> list[Section]:
    """Return sections with the first response of each model to some prompts.

    Args:
        lines: The lines of responses.jsonl; responses to the same prompt follow each other.
        num_generations: Responses of each model to each prompt.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        found.setdefault(line["model"], []).append(line)
    responses = {model: of_model[::num_generations] for model, of_model in found.items()}
    rows = {
        translate("Responses to the first held-out prompts"): range(len(responses["rlhf"]))[:FIRST],
        translate(
            "Responses whose score decreased most from {initial} to RLHF",
            initial=model_label(initial_model(responses)),
        ): largest_decreases(responses),
    }
    return [
        Section(title, tables=[prompt_table(responses, row) for row in of_title])
        for title, of_title in rows.items()
        if of_title
    ]


def prompt_table(responses: Responses, row: int) -> Table:
    """Return the table of the responses to a prompt, with the best one of each score marked."""
    keys = [key for key in ("score", "judge_score") if key in responses["rlhf"][row]]
    models = [
        [model_label(model), of_model[row]["response"].strip()]
        for model, of_model in responses.items()
    ]
    scores = [
        figure_cells(key, [Figure(of_model[row][key]) for of_model in responses.values()])
        for key in keys
    ]
    rows = [[*model, *cells] for model, *cells in zip(models, *scores, strict=True)]
    head = [translate("model"), translate("first response"), *(label_of(key) for key in keys)]
    return Table(responses["rlhf"][row]["prompt"].strip(), head, rows, has_texts=True)


def largest_decreases(responses: Responses) -> list[int]:
    """Return the rows where the score decreased most by RLHF, the largest decrease first.

    There are none if nothing scores.
    """
    if "score" not in responses["rlhf"][0]:
        return []
    changes = [
        after["score"] - before["score"]
        for after, before in zip(
            responses["rlhf"], responses[initial_model(responses)], strict=True
        )
    ]
    rows = sorted(range(len(changes)), key=changes.__getitem__)
    return [row for row in rows if changes[row] < 0][:DECREASED]
