"""The results of an evaluation: main results, and tables of all metrics."""

from functools import partial
from typing import Any

from snakechat.evaluation.comparisons import initial_model
from snakechat.reporting.formatting import format_estimate, format_number
from snakechat.reporting.labels import (
    MODELS,
    MOMENTS,
    N_,
    PAIRS,
    PERPLEXITIES,
    RESPONSES,
    STAGES,
    WIN_CRITERIA,
    headline_paths,
    label_of,
    model_label,
)
from snakechat.reporting.metric_tables import figure_cell, metric_panels, metric_table
from snakechat.reporting.metric_values import Figure, read_figure
from snakechat.reporting.page_parts import Card, Section, Table
from snakechat.reporting.translations import translate

Metrics = dict[str, Any]
# What an evaluation was made on.
COUNTS = {
    "rows": N_("held-out rows"),
    "pairs": N_("held-out pairs"),
    "responses": N_("held-out responses"),
    "num_prompts": N_("held-out prompts"),
}
# Shares of comparisons, by the length of the responses.
LENGTHS = {
    "longer": N_("longer response"),
    "when_longer": N_("win rate if longer"),
    "when_not_longer": N_("win rate if not longer"),
}
# Metrics of responses that have a figure.
PLOTTED = (
    *("score", "judge_score", "success", "kl_to_sft", "kl_to_dpo", "kl_to_base"),
    *("length", "ended_by_eos"),
)


def headline(stage: str, metrics: Metrics) -> list[Card]:
    """Return the main results of a recipe with their intervals, and n."""
    cards = []
    for path in headline_paths(stage, metrics):
        metric = path.removesuffix("_difference")
        is_difference = metric != path
        if (figure := read_figure(metrics, path)) is not None:
            label = label_of(metric)
            if is_difference:
                label = translate(
                    "change from {initial} to RLHF: {metric}",
                    initial=model_label(initial_model(metrics)),
                    metric=label,
                )
            text = format_estimate(metric, figure.value, figure.interval, is_difference)
            cards.append(Card(label, *text))
    [count] = [key for key in COUNTS if key in metrics]
    return [*cards, Card(translate(COUNTS[count]), format_number(metrics[count]))]


def result_section(stage: str, metrics: Metrics) -> Section:
    """Return the section of the results of a stage, from its metrics.json."""
    title = translate("Results: {model}", model=translate(STAGES[stage]))
    if stage == "rlhf":
        return rlhf_section(title, metrics)
    by_dataset = metrics.get("by_dataset", {})
    if stage == "sft":
        moments = {moment: translate(label) for moment, label in MOMENTS.items()}
        columns = {
            f"{name} {moment}".strip(): partial(figure_at, of, when)
            for name, of in {"": metrics, **by_dataset}.items()
            for when, moment in moments.items()
        }
        return Section(title, tables=[metric_table("", columns, PERPLEXITIES)])
    before = {translate("before training"): metrics["before"]} if "before" in metrics else {}
    datasets = before | {translate("all pairs"): metrics, **by_dataset}
    columns = {name: partial(read_figure, of) for name, of in datasets.items()}
    return Section(title, tables=[metric_table("", columns, PAIRS)])


def figure_at(metrics: Metrics, prefix: str, key: str) -> Figure | None:
    """Return the figure of a model or of a moment."""
    return read_figure(metrics, f"{prefix}.{key}")


def rlhf_section(title: str, metrics: Metrics) -> Section:
    """Return the section of the responses of all models to held-out prompts."""
    initial = initial_model(metrics)
    evaluated = metrics["intervals_95"]
    models = [model for model in MODELS if model in evaluated]
    models += [model for model in evaluated if model not in MODELS]
    columns = {model_label(model): partial(figure_at, metrics, model) for model in models}
    differences = {
        f"{model_label(model)} \N{MINUS SIGN} {model_label(initial)}": partial(
            difference_at, metrics, "" if model == "rlhf" else f"{model}_"
        )
        for model in models
        if model != initial
    }
    name = translate("Differences from {name}", name=model_label(initial))
    responses = translate(
        "Responses to {prompts} held-out prompts, {count} of each model to each prompt",
        prompts=format_number(metrics["num_prompts"]),
        count=format_number(metrics["num_generations"]),
    )
    return Section(
        title,
        panels=metric_panels(columns, PLOTTED),
        caption=translate(
            "Bars are 95 % intervals over prompts (rows with equal prompts count as one)."
        ),
        tables=[
            metric_table(name, differences, RESPONSES, differences=True),
            metric_table(responses, columns, RESPONSES),
            win_table(models, metrics),
        ],
    )


def difference_at(metrics: Metrics, prefix: str, key: str) -> Figure | None:
    """Return the difference of a model from the initial one."""
    return read_figure(metrics, f"{prefix}{key}_difference")


def win_table(models: list[str], metrics: Metrics) -> Table:
    """Return the table of win rates, and of win rates by which response is the longer one."""
    paths = [
        f"wins.{model}.{other}.{key}"
        for model in models
        for other in metrics["wins"].get(model, {})
        for key in WIN_CRITERIA
    ]
    rows = []
    for path in paths:
        if won := read_figure(metrics, path):
            shares = [read_figure(metrics, f"{path}.{key}") for key in LENGTHS]
            cells = [share and figure_cell("wins.", share) for share in (won, *shares)]
            rows.append([label_of(path), *cells])
    head = ["", translate("win rate (a tie is half a win)"), *map(translate, LENGTHS.values())]
    return Table(translate("Win rates and response lengths"), head, rows)
