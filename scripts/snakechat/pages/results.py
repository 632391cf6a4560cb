"""The results of an evaluation: main results, tables of all metrics, responses and remarks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from snakechat.evaluation.comparisons import initial_model
from snakechat.evaluation.intervals import mean_with_interval
from snakechat.pages.metrics import (
    BENCHMARKS,
    MODELS,
    MOMENTS,
    PAIRS,
    PERPLEXITIES,
    RESPONSES,
    STAGES,
    WIN_CRITERIA,
    Figure,
    benchmark_paths,
    headline_paths,
    label_of,
    model_label,
    read_figure,
)
from snakechat.pages.page import Card, Section, Table
from snakechat.pages.tables import (
    figure_cell,
    format_estimate,
    format_metric,
    metric_panels,
    metric_table,
)
from snakechat.pages.texts import N_, format_number, translate

Metrics = Mapping[str, Any]
# The lines of responses.jsonl of each model: the first response to each prompt.
Responses = Mapping[str, Sequence[dict[str, Any]]]
# What an evaluation was made on.
COUNTS = {
    "rows": N_("held-out rows"),
    "pairs": N_("held-out pairs"),
    "responses": N_("held-out responses"),
    "num_prompts": N_("held-out prompts"),
}
# Of which rows a column of metrics is: KTO has single responses.
ALL = {"pairs": N_("all pairs"), "responses": N_("all responses")}
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
# The accuracy of guessing which response of a pair is preferred.
GUESSING = 0.5
# Length ranks pairs as well as a model that is at most this much more accurate.
NEAR = 0.02
# Prompts on the page: the first ones, and those where the score decreased most.
FIRST, DECREASED = 10, 3


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
        return _rlhf_section(title, metrics)
    by_dataset = metrics.get("by_dataset", {})
    if stage == "sft":
        columns = {
            f"{name} {translate(moment)}".strip(): partial(_figure_at, of, f"{when}.")
            for name, of in {"": metrics, **by_dataset}.items()
            for when, moment in MOMENTS.items()
        }
        return Section(title, tables=[metric_table("", columns, PERPLEXITIES)])
    before = {translate("before training"): metrics["before"]} if "before" in metrics else {}
    [everything] = [translate(label) for kind, label in ALL.items() if kind in metrics]
    datasets = before | {everything: metrics, **by_dataset}
    columns = {name: partial(read_figure, of) for name, of in datasets.items()}
    return Section(title, tables=[metric_table("", columns, PAIRS)])


def _figure_at(metrics: Metrics, prefix: str, key: str, suffix: str = "") -> Figure | None:
    return read_figure(metrics, f"{prefix}{key}{suffix}")


def _rlhf_section(title: str, metrics: Metrics) -> Section:
    """Return the section of the responses of all models to held-out prompts."""
    initial = initial_model(metrics)
    evaluated = metrics["intervals_95"]
    models = [model for model in MODELS if model in evaluated]
    models += [model for model in evaluated if model not in MODELS]
    columns = {model_label(model): partial(_figure_at, metrics, f"{model}.") for model in models}
    differences = {
        f"{model_label(model)} \N{MINUS SIGN} {model_label(initial)}": partial(
            _difference_at, metrics, "" if model == "rlhf" else f"{model}_"
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
            _win_table(models, metrics),
        ],
    )


def _difference_at(metrics: Metrics, prefix: str, key: str) -> Figure | None:
    """Return the difference of a model from the initial one."""
    difference = _figure_at(metrics, prefix, key, "_difference")
    value = metrics[initial_model(metrics)].get(key, 0)
    return difference and difference._replace(scale=abs(value))


def _win_table(models: Sequence[str], metrics: Metrics) -> Table:
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


def benchmark_sections(stage: str, benchmarks: Mapping[str, Metrics]) -> list[Section]:
    """Return the section of the benchmarks of a recipe; none if it has no benchmarks.

    benchmarks: Their metrics.json by BENCHMARK/MODEL.
    """
    models: dict[str, dict[str, Any]] = {}
    for key, metrics in benchmarks.items():
        benchmark, _, model = key.partition("/")
        of_model = models.setdefault(model.removeprefix("compare_with."), {BENCHMARKS: {}})
        of_model[BENCHMARKS][benchmark] = metrics
    if not models:
        return []
    trained = models[stage]
    order = [name for name in MODELS if name in models]
    order += [name for name in models if name not in MODELS]
    columns = {model_label(name): partial(read_figure, models[name]) for name in order}
    paths = benchmark_paths(trained)
    tables = [metric_table("", columns, paths)]
    if others := models.keys() - {stage}:
        initial = initial_model(others)
        name = f"{model_label(stage)} \N{MINUS SIGN} {model_label(initial)}"
        change = partial(benchmark_change, models[initial], trained)
        tables.insert(0, metric_table("", {name: change}, paths, differences=True))
    return [Section(translate("Benchmarks"), tables=tables)]


def benchmark_change(before: Metrics, after: Metrics, path: str) -> Figure | None:
    """Return how a metric of a benchmark changed, with its interval where both have one.

    Of results by item, the interval is of the differences of the items.
    """
    old, new = (read_figure(metrics, path) for metrics in (before, after))
    if old is None or new is None:
        return None
    benchmark, _, key = path.removeprefix(f"{BENCHMARKS}.").rpartition(".")
    items = [of[BENCHMARKS][benchmark].get("items", {}).get(key, ()) for of in (before, after)]
    interval = None
    if items[0] and len(items[0]) == len(items[1]):
        differences = np.subtract(*reversed(items))
        # No limits: all differences may be 0.
        _, interval = mean_with_interval(differences, np.arange(len(differences)), 0, 0)
    elif old.interval and new.interval:
        # Half of each width; both are symmetric and independent.
        halves = [(high - low) / 2 for low, high in (old.interval, new.interval)]
        half = math.hypot(*halves)
        interval = [new.value - old.value - half, new.value - old.value + half]
    return Figure(new.value - old.value, interval, scale=abs(old.value))


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
    [*_, last] = responses.values()
    # A response that nothing scores has no score.
    keys = [
        key
        for key in ("score", "judge_score")
        if all(key in of_model[row] for of_model in responses.values())
    ]
    rows = [
        [
            model_label(model),
            of_model[row]["response"].strip(),
            *(figure_cell(key, Figure(of_model[row][key])) for key in keys),
        ]
        for model, of_model in responses.items()
    ]
    head = [translate("model"), translate("response"), *(label_of(key) for key in keys)]
    return Table(last[row]["prompt"].strip(), head, rows, has_texts=True)


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


def remarks_on(stage: str, metrics: Metrics) -> Iterator[str]:
    """Yield sentences on the evaluation of a recipe about what readers may misunderstand."""
    if stage == "rlhf":
        yield from _rlhf_remarks(metrics)
    elif "accuracy" in metrics:
        yield from _pair_remarks(metrics)


def _rlhf_remarks(metrics: Metrics) -> Iterator[str]:
    def direction(path: str) -> int:
        difference = read_figure(metrics, f"{path}_difference")
        return difference.direction if difference else 0

    initial = initial_model(metrics)
    if direction("base_score") > 0:
        yield translate(
            "The base model scores higher ({base}) than {initial} ({trained}). This does not mean"
            " that its responses are better: a reward model ranks responses of the kind that it was"
            " trained on, and its scores of other texts are arbitrary.",
            base=format_number(metrics["base"]["score"]),
            initial=model_label(initial),
            trained=format_number(metrics[initial]["score"]),
        )
    for key in ("judge_score", "success"):
        if direction("score") > 0 > direction(key):
            yield translate(
                "The score rises from {initial} to RLHF, but another metric falls ({metric}): the"
                " policy exploits errors of the reward model.",
                initial=model_label(initial),
                metric=label_of(key),
            )
    counts = [count["normalized"] for count in metrics.get("contamination", {}).values()]
    if any(counts):
        yield translate(
            "{count} of the {total} evaluated prompts also occur in training data: results on them"
            " are optimistic.",
            count=format_number(max(counts)),
            total=format_number(metrics["num_prompts"]),
        )


def _pair_remarks(metrics: Metrics) -> Iterator[str]:
    datasets = {translate("all pairs"): metrics, **metrics.get("by_dataset", {})}
    for dataset, of in datasets.items():
        accuracy = read_figure(of, "accuracy")
        assert accuracy is not None and accuracy.interval is not None
        if accuracy.interval[0] <= GUESSING <= accuracy.interval[1]:
            yield translate(
                "The accuracy on {pairs} is not distinguishable from guessing: its 95 % interval"
                " contains 50 %.",
                pairs=dataset,
            )
    if metrics["accuracy"] - metrics["longer_wins_accuracy"] < NEAR:
        yield translate(
            "Choosing the longer response is about as accurate ({longer}): the model may have"
            " learned little more than length.",
            longer=format_metric("accuracy", metrics["longer_wins_accuracy"]),
        )
