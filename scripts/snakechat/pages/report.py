"""The report of a recipe: its results with remarks, training, data, lineage and costs."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from snakechat.evaluation.comparisons import initial_model, mean_difference
from snakechat.pages import jobs
from snakechat.pages.jobs import Training
from snakechat.pages.metrics import (
    BENCHMARKS,
    NAMES,
    STAGES,
    Figure,
    benchmark_paths,
    curve_labels,
    format_number,
    format_share,
    headline_paths,
    label_of,
    name_of,
    numbers_of,
    read_benchmarks,
    read_figure,
    read_json,
    read_json_lines,
    translate,
)
from snakechat.pages.page import (
    Cell,
    Page,
    Section,
    Table,
    figure_cell,
    format_metric,
    metric_table,
    value_table,
    write_csv,
    write_headline,
    write_record,
)
from snakechat.pages.plots import curve_panels, points_of
from snakechat.pages.rows import TokenizedRows, response_sections, row_tables
from snakechat.workflow.job import Job
from snakechat.workflow.manifest import read_run_record, upstream_first

Metrics = Mapping[str, Any]
# The accuracy of guessing which response of a pair is preferred.
GUESSING = 0.5
# Why few of the saved weights have changed, by facts["unchanged_because"] of a training.
UNCHANGED = {"learning_rate": "remark_learning_rate", "rounding": "remark_rounding"}
# Length ranks pairs as well as a model that is at most this much more accurate.
NEAR = 0.02
# Training rows of each stage that a report shows by token.
SHOWN_ROWS = 2


def report(job: Job[Any]) -> Page:
    """Return the page of a recipe; write its record, a table of all metrics and the headline.

    The start page of Snakemake's report shows the headline.
    """
    stage, lineage, inputs = job.settings.stage, job.lineage, job.inputs
    runs = {path: read_run_record(path, lineage[path]) for path in upstream_first(lineage)}
    trainings = []
    # RLHF from a plain model has no SFT model, and with reward functions only, no reward model.
    for each in (each for each in NAMES["stages"] if f"train_{each}" in inputs):
        path = job.spec["inputs"][f"train_{each}"]["path"]
        folders = inputs[f"train_{each}"], inputs[f"evaluate_{each}"]
        training = jobs.read_training(each, path, lineage[path], *folders)
        tokens = read_json(inputs[f"tokens.{each}"] / "stats.json")
        trainings.append(training._replace(tokens=tokens))
    # The recipe first, then the models behind it.
    own, *others = sorted(trainings, key=lambda training: training.stage != stage)
    responses = []
    if stage != "reward":
        lines = read_json_lines(inputs[f"evaluate_{stage}"] / "responses.jsonl")
        responses = response_sections(lines, own.metrics.get("num_generations", 1))
    datasets = {
        name.removeprefix("records."): read_json(folder / "stats.json")
        for name, folder in inputs.items()
        if name.startswith("records.")
    }
    page = Page(
        eyebrow=translate("report"),
        title=f"{stage}/{job.settings.name}",
        cards=headline(stage, own.metrics),
        remarks=[f"{of.title}: {remark}" for of in trainings for remark in remarks_on(of)],
        sections=[
            *(result_section(of.stage, of.metrics) for of in (own, *others)),
            *benchmark_sections(stage, read_benchmarks(inputs)),
            *responses,
            *(training_section(of, inputs) for of in trainings),
            jobs.row_section(trainings, datasets),
            jobs.job_section(lineage, jobs.source_licenses(lineage, job.options.licenses), runs),
        ],
        notes=[translate("report_note")],
    )
    write_record(job.result, page)
    cost = {translate("total_time"): Cell(jobs.total_cost(runs))}
    write_headline(job.result / "headline.html", {**page.cards, **cost})
    numbers = [
        (of.stage, name, f"{value:.10g}")
        for of in trainings
        for name, value in numbers_of(of.metrics)
    ]
    write_csv(job.result / "metrics.csv", ("stage", "metric", "value"), numbers)
    return page


def training_section(training: Training, folders: Mapping[str, Path]) -> Section:
    """Return the section of a training: curves, the run, the first rows, settings and software.

    folders: The inputs of the job.
    """
    stage, settings, steps = training.stage, training.settings, training.steps
    lines = {
        translate("training"): lambda key: points_of(steps, key),
        translate("held_out_rows"): lambda key: points_of(steps, f"eval_{key}"),
    }
    tokens, model = (folders[f"{key}{stage}"] for key in ("tokens.", "train_"))
    rows = TokenizedRows(tokens, "train", model, settings.get("train_on") == "all_tokens")
    folded = {
        # The table of software has the distributions of a command.
        translate("settings"): {k: v for k, v in settings.items() if k != "distributions"},
        translate("placement"): training.run.get("placement", {}),
        translate("software"): training.run.get("versions", {}),
    }
    return Section(
        translate("training_of", model=training.title),
        panels=curve_panels(curve_labels(stage, settings, steps), lines),
        caption=translate("curves_note"),
        tables=[
            *([jobs.run_table(training)] if training.run else []),
            *row_tables(rows, range(min(SHOWN_ROWS, len(rows)))),
        ],
        folded=[value_table(name, dict(sorted(of.items()))) for name, of in folded.items() if of],
    )


# --- results --------------------------------------------------------------------------------------


def headline(stage: str, metrics: Metrics) -> dict[str, Cell]:
    """Return the main results of a recipe with their intervals, and n, by name."""
    cards = {}
    for path in headline_paths(stage, metrics):
        if (figure := read_figure(metrics, path)) is not None:
            metric = path.removesuffix("_difference")
            label = label_of(metric)
            if metric != path:
                initial = name_of("models", initial_model(metrics))
                label = translate("change_to_rlhf", initial=initial, metric=label)
            cards[label] = figure_cell(metric, figure)
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
    counts = metrics.get("contamination", {}).values()
    if any(counts):
        count, total = map(format_number, (max(counts), metrics["num_prompts"]))
        yield translate("remark_contamination", count=count, total=total)
