"""The report of a recipe: its results with remarks, training, data, lineage and costs."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from snakechat.evaluation.comparisons import initial_model, mean_difference
from snakechat.pages.metrics import (
    BENCHMARKS,
    NAMES,
    STAGES,
    Figure,
    benchmark_paths,
    describe_origin,
    format_duration,
    format_number,
    format_share,
    label_of,
    name_of,
    numbers_of,
    read_benchmarks,
    read_figure,
    read_json_lines,
    run_value,
    translate,
)
from snakechat.pages.page import (
    HTML,
    Cell,
    Page,
    Section,
    Table,
    figure_cell,
    metric_table,
    table_of,
    value_table,
    write_csv,
    write_record,
)
from snakechat.pages.rows import row_reader, row_tables
from snakechat.pages.trainings import Training, curves, points_of, read_training, run_table
from snakechat.workflow.job import Job
from snakechat.workflow.manifest import Lineage, read_run_record, upstream_first

Metrics = Mapping[str, Any]
Runs = Mapping[str, Metrics | None]
# Why few of the saved weights have changed, by facts["unchanged_because"] of a training.
UNCHANGED = {"learning_rate": "remark_learning_rate", "rounding": "remark_rounding"}
# Training rows of each stage that a report shows by token.
SHOWN_ROWS = 2
# Prompts with responses: the first ones, and those where the score decreased most.
FIRST, DECREASED = 10, 3
# What the table of costs shows of run.json.
COSTS = ("started", "seconds", "peak_memory_mb", "peak_gpu_memory_mb")


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
        folders = (inputs[name] for name in (f"train_{each}", f"evaluate_{each}", f"tokens.{each}"))
        trainings.append(read_training(each, path, lineage[path], *folders))
    # The recipe first, then the models behind it.
    own, *others = sorted(trainings, key=lambda training: training.stage != stage)
    evaluation = inputs[f"evaluate_{stage}"]
    lines = read_json_lines(evaluation / "responses.jsonl") if stage != "reward" else []
    datasets = {
        name.removeprefix("records."): json.loads((folder / "stats.json").read_text())["train"]
        for name, folder in inputs.items()
        if name.startswith("records.")
    }
    page = Page(
        eyebrow=translate("report"),
        title=f"{stage}/{job.settings.name}",
        cards=headline(stage, own.metrics),
        remarks=[
            f"{name_of('stages', of.stage)}: {remark}"
            for of in trainings
            for remark in remarks_on(of)
        ],
        sections=[
            *(result_section(of.stage, of.metrics) for of in (own, *others)),
            *benchmark_sections(stage, read_benchmarks(inputs)),
            *response_sections(lines, own.metrics.get("num_generations", 1)),
            *(training_section(of, inputs) for of in trainings),
            row_section(trainings, datasets),
            job_section(lineage, runs),
        ],
        notes=[translate("report_note")],
    )
    write_record(job.result, page)
    cards = {**page.cards, translate("total_time"): Cell(total_cost(runs))}
    text = HTML.get_template("report_headline.html").render(cards=cards)
    (job.result / "headline.html").write_text(text, encoding="utf-8")
    rows = (
        (of.stage, name, f"{value:.10g}")
        for of in trainings
        for name, value in numbers_of(of.metrics)
    )
    write_csv(job.result / "metrics.csv", ("stage", "metric", "value"), rows)
    return page


def training_section(training: Training, folders: Mapping[str, Path]) -> Section:
    """Return the section of a training; `folders`, the inputs of the job, have its rows."""
    stage, settings, steps = training.stage, training.settings, training.steps
    lines = {
        translate("training"): lambda key: points_of(steps, key),
        translate("held_out_rows"): lambda key: points_of(steps, f"eval_{key}"),
    }
    tokens, model = (folders[f"{key}{stage}"] for key in ("tokens.", "train_"))
    read_row = row_reader(tokens, "train", model, settings.get("train_on") == "all_tokens")
    folded = {
        # The table of software has the distributions of a command.
        translate("settings"): {k: v for k, v in settings.items() if k != "distributions"},
        translate("placement"): training.run.get("placement", {}),
        translate("software"): training.run.get("versions", {}),
    }
    return Section(
        translate("training_of", model=name_of("stages", stage)),
        figures=curves(training.curve_labels(), lines),
        tables=[
            *([run_table(training)] if training.run else []),
            *row_tables(read_row, range(min(SHOWN_ROWS, training.tokens["train"]["rows"]))),
        ],
        folded=[value_table(name, dict(sorted(of.items()))) for name, of in folded.items() if of],
    )


def remarks_on(training: Training) -> Iterator[str]:
    """Yield sentences about what readers of a report may misunderstand."""
    metrics, facts = training.metrics, training.facts
    if training.stage == "rlhf":
        directions = {
            key: figure.direction
            for key in ("score", "judge_score", "success")
            if (figure := read_figure(metrics, f"{key}_difference"))
        }
        initial = name_of("models", initial_model(metrics))
        for key, direction in directions.items():
            if directions.get("score", 0) > 0 > direction:
                yield translate("remark_exploited", initial=initial, metric=label_of(key))
        counts = metrics.get("contamination", {}).values()
        if any(counts):
            count, total = map(format_number, (max(counts), metrics["num_prompts"]))
            yield translate("remark_contamination", count=count, total=total)
    if reason := UNCHANGED.get(facts.get("unchanged_because", "")):
        values = {**facts, "dtype": training.settings["dtype"]}
        yield translate(reason, share=format_share(facts["changed_weights"]), **values)


def response_sections(lines: Sequence[Mapping[str, Any]], num_generations: int) -> list[Section]:
    """Return sections with the first response of each model to some prompts.

    lines: Of responses.jsonl; each model's num_generations responses to a prompt follow each other.
    """
    models: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        models.setdefault(line["model"], []).append(line)
    firsts = zip(*(of_model[::num_generations] for of_model in models.values()), strict=True)
    prompts = [dict(zip(models, of_prompt, strict=True)) for of_prompt in firsts]
    shown = {translate("first_responses"): prompts[:FIRST]}
    if "rlhf" in models:
        initial = initial_model(models)

        def change(of_prompt: Mapping[str, Any]) -> float:
            before, after = (of_prompt[name].get("score", math.nan) for name in (initial, "rlhf"))
            return float(after - before)

        title = translate("worse_responses", initial=name_of("models", initial))
        shown[title] = sorted((of for of in prompts if change(of) < 0), key=change)[:DECREASED]
    return [
        Section(title, tables=[_prompt_table([*of_prompt.values()]) for of_prompt in of_title])
        for title, of_title in shown.items()
        if of_title
    ]


def _prompt_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of the responses to a prompt, one of each model, with their scores."""
    # A response that nothing scores has no score.
    keys = [key for key in ("score", "judge_score") if all(key in line for line in lines)]
    rows = [
        [name_of("models", line["model"]), line["response"].strip()]
        + [figure_cell(key, Figure(line[key])) for key in keys]
        for line in lines
    ]
    head = [translate("model"), translate("response"), *map(label_of, keys)]
    return Table(lines[0]["prompt"].strip(), head, rows, has_texts=True)


# --- data and costs ------------------------------------------------------------------------------


def row_section(trainings: Sequence[Training], datasets: Mapping[str, Metrics]) -> Section:
    """Return the section of the rows of each dataset and phase, and of their lengths.

    datasets: Statistics of the training rows of the datasets, by name.
    """
    columns = {"mean": translate("mean"), **{f"p{n}": f"p{n}" for n in (1, 10, 50, 90, 99)}}
    columns["p100"] = translate("maximum")
    repeated = {
        name: {
            translate("rows"): of["rows"],
            translate("repeated_prompts"): format_share(of["repeated_prompts"] / of["rows"]),
        }
        for name, of in datasets.items()
    }
    splits = {f"{t.stage}.{split}": of for t in trainings for split, of in t.tokens.items()}
    counts = {
        name: {translate("rows"): of["rows"]}
        | {
            f"{translate(kind)}: {why}": number
            for kind in ("truncated", "dropped")
            for why, number in of[kind].items()
        }
        for name, of in splits.items()
    }
    lengths = {
        f"{name}: {what}": {head: found[key] for key, head in columns.items()}
        for name, of in splits.items()
        for what, found in of["tokens"].items()
    }
    tables = [
        table_of(translate("datasets"), repeated),
        table_of(translate("phases"), counts),
        table_of(translate("lengths"), lengths),
    ]
    return Section(translate("rows_and_prompts"), tables=tables)


def job_section(lineage: Lineage, runs: Runs) -> Section:
    """Return the section of the jobs that a report was made from, each below its inputs.

    runs: run.json of each job, by path; None if it is unknown.
    """
    rows = {}
    for path, run in runs.items():
        job = lineage[path]
        rows[path.removeprefix("output/")] = {
            translate("inputs"): ", ".join(each.removeprefix("output/") for each in job["inputs"]),
            translate("source"): describe_origin(job),
            translate("spec"): job["spec"][:16],
            # The changes after which a result was accepted (scripts/accept.py).
            translate("accepted"): ", ".join(
                f"{entry['date']}: {entry['because']} ({'; '.join(entry['changes'])})"
                for entry in job.get("accepted", ())
            ),
            **{name_of("run", key): run_value(key, run.get(key)) if run else "?" for key in COSTS},
        }
    rows[translate("total_time")] = {name_of("run", "seconds"): total_cost(runs)}
    table = table_of("", rows, translate("jobs_note"), translate("job"))._replace(has_texts=True)
    return Section(translate("jobs"), tables=[table])


def total_cost(runs: Runs) -> str:
    """Return the time of all jobs together."""
    return format_duration(sum(run["seconds"] for run in runs.values() if run))


# --- results --------------------------------------------------------------------------------------


def headline(stage: str, metrics: Metrics) -> dict[str, Cell]:
    """Return the main results of a recipe with their intervals, and n, by name."""
    cards, initial = {}, initial_model(metrics) if stage == "rlhf" else ""
    for path in (each.format(initial=initial) for each in STAGES[stage]["headline"]):
        if figure := read_figure(metrics, path):
            metric = path.removesuffix("_difference")
            label = label_of(metric)
            if metric != path:
                label = translate(
                    "change_to_rlhf", initial=name_of("models", initial), metric=label
                )
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
    paths = benchmark_paths(models[stage])
    tables = [metric_table("", columns, paths)]
    if others := models.keys() - {stage}:
        initial = initial_model(others)
        change = partial(benchmark_change, models[initial], models[stage])
        changes = {difference_name(stage, initial): change}
        tables.insert(0, metric_table("", changes, paths, differences=True))
    return [Section(translate("benchmarks"), tables=tables)]


def benchmark_change(before: Metrics, after: Metrics, path: str) -> Figure | None:
    """Return how a metric of a benchmark changed, with the interval.

    If the benchmark has items, it is the interval of their differences.
    """
    old, new = (read_figure(metrics, path) for metrics in (before, after))
    if old is None or new is None:
        return None
    benchmark, _, key = path.removeprefix(f"{BENCHMARKS}.").rpartition(".")
    items = [of[BENCHMARKS][benchmark].get("items", {}).get(key, ()) for of in (before, after)]
    difference, interval = new.value - old.value, None
    if items[0] and len(items[0]) == len(items[1]):
        old_items, new_items = (np.array([values], float) for values in items)
        clusters = np.arange(len(items[0]))
        interval = mean_difference(new_items, old_items, clusters)["interval_95"]
    elif old.interval and new.interval:
        # Half of each width; both are symmetric and independent.
        half = math.hypot(*((high - low) / 2 for low, high in (old.interval, new.interval)))
        interval = [difference - half, difference + half]
    return Figure(difference, interval, scale=abs(old.value))
