"""Pages of prompts that users write: responses side by side, and scored pairs."""

from collections.abc import Mapping, Sequence
from typing import Any

from snakechat.pages.metrics import Figure, label_of, read_figure
from snakechat.pages.page import Card, Page, Section, Table
from snakechat.pages.tables import figure_cell
from snakechat.pages.texts import N_, translate

DECODERS = (N_("greedy"), N_("sampled"))
PAIR_HEAD = (
    *(N_("prompt"), N_("good response (chosen)"), N_("score")),
    *(N_("bad response (rejected)"), N_("score"), N_("margin"), N_("margin of the base model")),
)


def response_page(title: str, lines: Sequence[dict[str, Any]], settings: Mapping[str, Any]) -> Page:
    """Return the page of prompt_eval: a table for each prompt, with a row for each model.

    Args:
        title: The recipe.
        lines: The lines of responses.jsonl.
        settings: Settings of the job that sampled them.
    """
    head = [translate("model"), *map(translate, DECODERS)]
    # The texts of each model by decoder, of each prompt of each set.
    sets: dict[str, dict[str, dict[str, dict[str, str]]]] = {}
    for line in lines:
        models = sets.setdefault(line["set"], {}).setdefault(line["prompt"], {})
        text = line["text"].strip() + ("" if line["ended"] else " […]")
        models.setdefault(line["model"], {})[line["decoder"]] = text
    sections = []
    for name, prompts in sets.items():
        tables = []
        for prompt, models in prompts.items():
            rows = [[model, *(of[each] for each in DECODERS)] for model, of in models.items()]
            tables.append(Table(prompt, head, rows, has_texts=True))
        sections.append(Section(name, tables=tables))
    note = translate(
        "Sampling: temperature {temperature}, seed {seed}. A response has at most"
        " {max_response_length} tokens; […] marks responses that were truncated there.",
        **settings,
    )
    return Page(translate("Responses side by side"), title, sections, notes=[note])


def score_page(title: str, lines: Sequence[dict[str, Any]], metrics: Mapping[str, Any]) -> Page:
    """Return the page of rw_eval: a table for each set, with a row for each pair.

    A positive margin is better, a negative one worse.

    Args:
        title: The recipe.
        lines: The lines of scores.jsonl.
        metrics: Content of metrics.json.
    """
    rows: dict[str, list[list[Any]]] = {}
    for line in lines:
        of_set = rows.setdefault(line["set"], [])
        margin, scale = line["margin"], abs(line["chosen_score"])
        of_set.append(
            [
                str(len(of_set) + 1),
                *(line["prompt"], line["chosen"], _score_cell(line["chosen_score"])),
                *(line["rejected"], _score_cell(line["rejected_score"])),
                figure_cell("score", Figure(margin, [margin] * 2, scale=scale), True)._replace(
                    interval=""
                ),
                _score_cell(line["base_margin"]),
            ]
        )
    head = ["", *map(translate, PAIR_HEAD)]
    sections = [
        Section(name, tables=[Table("", head, of_set, has_texts=True)])
        for name, of_set in rows.items()
    ]
    cards = [
        Card(label_of(key), cell.value, cell.interval)
        for key in ("accuracy", "ties")
        if (figure := read_figure(metrics, key)) and (cell := figure_cell(key, figure))
    ]
    base = figure_cell("accuracy", Figure(metrics["base_accuracy"]))
    cards.insert(1, Card(translate("accuracy of the base model"), base.value))
    return Page(translate("Scores of good and bad responses"), title, sections, cards)


def _score_cell(score: float) -> Any:
    return figure_cell("score", Figure(score))
