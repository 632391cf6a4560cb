"""Responses: to held-out prompts, and to prompts that users write, side by side or scored."""

from collections.abc import Mapping, Sequence
from typing import Any

from snakechat.evaluation.comparisons import initial_model
from snakechat.pages.metrics import Figure, label_of, model_label, read_figure
from snakechat.pages.page import Page, Section, Table
from snakechat.pages.tables import figure_cell
from snakechat.pages.texts import N_, translate

# The lines of responses.jsonl of each model: the first response to each prompt.
Responses = Mapping[str, Sequence[dict[str, Any]]]
# Prompts on the page: the first ones, and those where the score decreased most.
FIRST, DECREASED = 10, 3
# Columns of the pages of users' prompts.
DECODERS = (N_("greedy"), N_("sampled"))
PAIR_HEAD = (
    *(N_("prompt"), N_("good response (chosen)"), N_("score")),
    *(N_("bad response (rejected)"), N_("score"), N_("margin"), N_("margin of the base model")),
)


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
    [*_, last] = responses.values()
    rows = {translate("Responses to the first held-out prompts"): list(range(len(last))[:FIRST])}
    if "rlhf" in responses:
        title = translate(
            "Responses whose score decreased most from {initial} to RLHF",
            initial=model_label(initial_model(responses)),
        )
        rows[title] = _largest_decreases(responses)
    return [
        Section(title, tables=[_prompt_table(responses, row) for row in of_title])
        for title, of_title in rows.items()
        if of_title
    ]


def _prompt_table(responses: Responses, row: int) -> Table:
    """Return the table of the responses to a prompt, with their scores."""
    lines = {model: of_model[row] for model, of_model in responses.items()}
    # A response that nothing scores has no score.
    keys = [k for k in ("score", "judge_score") if all(k in line for line in lines.values())]
    rows = []
    for model, line in lines.items():
        scores = [figure_cell(key, Figure(line[key])) for key in keys]
        rows.append([model_label(model), line["response"].strip(), *scores])
    head = [translate("model"), translate("response"), *map(label_of, keys)]
    return Table([*lines.values()][-1]["prompt"].strip(), head, rows, has_texts=True)


def _largest_decreases(responses: Responses) -> list[int]:
    """Return the rows where the score decreased most by RLHF, the largest decrease first.

    There are none if nothing scores.
    """
    pairs = zip(responses["rlhf"], responses[initial_model(responses)], strict=True)
    changes = {
        row: after["score"] - before["score"]
        for row, (after, before) in enumerate(pairs)
        if "score" in after and "score" in before
    }
    return [row for row in sorted(changes, key=changes.__getitem__) if changes[row] < 0][:DECREASED]


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
    sets: dict[str, list[list[Any]]] = {}
    for line in lines:
        chosen, rejected, base = (
            figure_cell("score", Figure(line[key]))
            for key in ("chosen_score", "rejected_score", "base_margin")
        )
        # Its interval is the number itself: it is marked unless it is rounding.
        margin = Figure(line["margin"], [line["margin"]] * 2, scale=abs(line["chosen_score"]))
        marked = figure_cell("score", margin, True)._replace(interval="")
        rows = sets.setdefault(line["set"], [])
        texts = line["prompt"], line["chosen"], chosen, line["rejected"], rejected
        rows.append([str(len(rows) + 1), *texts, marked, base])
    head = ["", *map(translate, PAIR_HEAD)]
    sections = [
        Section(name, tables=[Table("", head, rows, has_texts=True)]) for name, rows in sets.items()
    ]
    names = {
        "accuracy": label_of("accuracy"),
        "base_accuracy": translate("accuracy of the base model"),
        "ties": label_of("ties"),
    }
    cards = {
        name: figure_cell("accuracy", figure)
        for key, name in names.items()
        if (figure := read_figure(metrics, key))
    }
    return Page(translate("Scores of good and bad responses"), title, sections, cards)
