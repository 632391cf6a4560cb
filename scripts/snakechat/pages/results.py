"""The results of an evaluation: main results, tables of all metrics, and remarks."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from snakechat.evaluation.comparisons import initial_model, mean_difference
from snakechat.pages.jobs import Training
from snakechat.pages.metrics import (
    BENCHMARKS,
    STAGES,
    Figure,
    benchmark_paths,
    headline_paths,
    label_of,
    read_figure,
)
from snakechat.pages.page import Cell, Section, Table, figure_cell, format_metric, metric_table
from snakechat.pages.texts import NAMES, format_number, format_share, name_of, translate

Metrics = Mapping[str, Any]
# The accuracy of guessing which response of a pair is preferred.
GUESSING = 0.5
# Why few of the saved weights have changed, by facts["unchanged_because"] of a training.
UNCHANGED = {"learning_rate": "remark_learning_rate", "rounding": "remark_rounding"}
# Length ranks pairs as well as a model that is at most this much more accurate.
NEAR = 0.02


def headline(stage: str, metrics: Metrics) -> dict[str, Cell]:
    """Return the main results of a recipe with their intervals, and n, by name."""
    cards = {}
    for path in headline_paths(stage, metrics):
        metric = path.removesuffix("_difference")
        is_difference = metric != path
        if (figure := read_figure(metrics, path)) is not None:
            label = label_of(metric)
            if is_difference:
                initial = name_of("models", initial_model(metrics))
                label = translate("change_to_rlhf", initial=initial, metric=label)
            cards[label] = figure_cell(metric, figure, is_difference)
    [count] = NAMES["counts"].keys() & metrics.keys()
    return cards | {name_of("counts", count): Cell(format_number(metrics[count]))}


def figure_at(metrics: Metrics, prefix: str = "", suffix: str = "") -> Callable[[str], Any]:
    """Return a function of a key that returns the figure at PREFIX KEY SUFFIX, or None."""
    return lambda key: read_figure(metrics, f"{prefix}{key}{suffix}")


def result_section(stage: str, metrics: Metrics) -> Section:
    """Return the section of the results of a stage, from its metrics.json."""
    title = translate("results_of", model=name_of("stages", stage))
    if stage == "rlhf":
        return Section(title, tables=_response_tables(metrics))
    by_dataset = metrics.get("by_dataset", {})
    if stage == "sft":
        columns = {
            f"{name} {name_of('moments', moment)}".strip(): figure_at(of, f"{moment}.")
            for name, of in {"": metrics, **by_dataset}.items()
            for moment in NAMES["moments"]
        }
    else:
        before = {name_of("moments", "before"): metrics["before"]} if "before" in metrics else {}
        [kind] = NAMES["all"].keys() & metrics.keys()
        datasets = before | {name_of("all", kind): metrics, **by_dataset}
        columns = {name: figure_at(of) for name, of in datasets.items()}
    return Section(title, tables=[metric_table("", columns, NAMES[STAGES[stage]["results"]])])


def in_order(models: Mapping[str, Any]) -> list[str]:
    """Return models in the order of training, others after them."""
    return sorted(models, key=lambda name: [*NAMES["models"], name].index(name))


def difference_name(model: str, initial: str) -> str:
    """Return the name of the difference of a model from another one."""
    return f"{name_of('models', model)} \N{MINUS SIGN} {name_of('models', initial)}"


def _response_tables(metrics: Metrics) -> list[Table]:
    """Return the tables of the responses of all models to held-out prompts."""
    initial = initial_model(metrics)
    models = in_order(metrics["intervals_95"])
    columns = {name_of("models", model): figure_at(metrics, f"{model}.") for model in models}

    def difference_at(model: str, key: str) -> Figure | None:
        prefix = "" if model == "rlhf" else f"{model}_"
        difference = read_figure(metrics, f"{prefix}{key}_difference")
        return difference and difference._replace(scale=abs(metrics[initial].get(key, 0)))

    differences = {
        difference_name(model, initial): partial(difference_at, model)
        for model in models
        if model != initial
    }
    wins = [
        f"wins.{model}.{other}.{key}"
        for model in models
        for other in metrics["wins"].get(model, {})
        for key in NAMES["wins"]
    ]
    won = {name_of("comparisons", key): figure_at(metrics, "", key) for key in NAMES["comparisons"]}
    counts = {key: format_number(metrics[key]) for key in ("num_prompts", "num_generations")}
    keys = NAMES["responses"]
    name = translate("differences_from", name=name_of("models", initial))
    return [
        metric_table(name, differences, keys, differences=True),
        metric_table(translate("responses_of_models", **counts), columns, keys),
        metric_table(translate("win_rates"), won, wins),
    ]


def benchmark_sections(stage: str, found: Mapping[str, Metrics]) -> list[Section]:
    """Return the section of the benchmarks that read_benchmarks found, if there are any."""
    if not found:
        return []
    models = {label.removeprefix("compare_with."): metrics for label, metrics in found.items()}
    columns = {name_of("models", model): figure_at(models[model]) for model in in_order(models)}
    trained = models[stage]
    paths = benchmark_paths(trained)
    tables = [metric_table("", columns, paths)]
    if others := models.keys() - {stage}:
        initial = initial_model(others)
        name = difference_name(stage, initial)
        change = partial(benchmark_change, models[initial], trained)
        tables.insert(0, metric_table("", {name: change}, paths, differences=True))
    return [Section(translate("benchmarks"), tables=tables)]


def benchmark_change(before: Metrics, after: Metrics, path: str) -> Figure | None:
    """Return how a metric of a benchmark changed, with the interval; of items, of differences."""
    old, new = (read_figure(metrics, path) for metrics in (before, after))
    if old is None or new is None:
        return None
    benchmark, _, key = path.removeprefix(f"{BENCHMARKS}.").rpartition(".")
    items = [of[BENCHMARKS][benchmark].get("items", {}).get(key, ()) for of in (before, after)]
    difference, interval = new.value - old.value, None
    if items[0] and len(items[0]) == len(items[1]):
        old_items, new_items = (np.array([values], float) for values in items)
        rows = np.arange(len(items[0]))
        interval = mean_difference(new_items, old_items, rows)["interval_95"]
    elif old.interval and new.interval:
        # Half of each width; both are symmetric and independent.
        half = math.hypot(*((high - low) / 2 for low, high in (old.interval, new.interval)))
        interval = [difference - half, difference + half]
    return Figure(difference, interval, scale=abs(old.value))


# --- remarks ------------------------------------------------------------------------------------


def remarks_on(training: Training) -> Iterator[str]:
    """Yield sentences about what readers of a report may misunderstand."""
    metrics, facts = training.metrics, training.facts
    if training.stage == "rlhf":
        yield from _response_remarks(metrics)
    if "accuracy" in metrics:
        datasets = {name_of("all", "pairs"): metrics, **metrics.get("by_dataset", {})}
        for dataset, of in datasets.items():
            low, high = of["intervals_95"]["accuracy"]
            if low <= GUESSING <= high:
                yield translate("remark_guessing", pairs=dataset)
        longer = metrics["longer_wins_accuracy"]
        if metrics["accuracy"] - longer < NEAR:
            yield translate("remark_length", longer=format_metric("accuracy", longer))
    if reason := UNCHANGED.get(facts.get("unchanged_because", "")):
        values = {**facts, "dtype": training.settings["dtype"]}
        yield translate(reason, share=format_share(facts["changed_weights"]), **values)


def _response_remarks(metrics: Metrics) -> Iterator[str]:
    """Yield remarks on the responses of all models."""

    def direction(key: str) -> int:
        difference = read_figure(metrics, f"{key}_difference")
        return difference.direction if difference else 0

    initial = initial_model(metrics)
    name = name_of("models", initial)
    if direction("base_score") > 0:
        base, trained = (format_number(metrics[model]["score"]) for model in ("base", initial))
        yield translate("remark_base", base=base, initial=name, trained=trained)
    for key in ("judge_score", "success"):
        if direction("score") > 0 > direction(key):
            yield translate("remark_exploited", initial=name, metric=label_of(key))
    counts = [count["normalized"] for count in metrics.get("contamination", {}).values()]
    if any(counts):
        count, total = map(format_number, (max(counts), metrics["num_prompts"]))
        yield translate("remark_contamination", count=count, total=total)
