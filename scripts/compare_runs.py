"""Compare recipes of a stage on one page: settings that differ, results and curves.

A recipe is NAME, or NAME@KEY for a version in the store.

Recipes that differ only in their seed are one column: mean and interval over the seeds. Those with
another ZeRO stage are columns of their own. comparison.csv has the same numbers.
"""

import csv
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from snakechat.evaluation.comparisons import INITIAL_MODELS
from snakechat.reporting.comparison import (
    COLUMNS,
    Group,
    Run,
    group_by_settings,
    long_rows,
)
from snakechat.reporting.curves import curve_panels
from snakechat.reporting.formatting import format_duration, format_memory, format_number
from snakechat.reporting.labels import (
    MODELS,
    MOMENTS,
    N_,
    PAIRS,
    PERPLEXITIES,
    RESPONSES,
    STAGES,
    WIN_CRITERIA,
)
from snakechat.reporting.metric_tables import metric_panels, metric_table
from snakechat.reporting.metric_values import Figure, with_metrics_before
from snakechat.reporting.page_parts import Page, Section, Table
from snakechat.reporting.page_rendering import write_page
from snakechat.reporting.setting_differences import (
    as_texts,
    comparable_settings,
    setting_differences,
)
from snakechat.reporting.translations import set_language, translate
from snakechat.workflow.job import Job, run
from snakechat.workflow.lineage import merge_lineages
from snakechat.workflow.placement import placement_of
from snakechat.workflow.run_record import read_run_record
from snakechat.workflow.stored_versions import is_version, read_version_file

# Keys of a placement that are compared like settings: trainings at each ZeRO stage, say.
PLACEMENT = ("zero_stage", "critic_zero_stage", "offload")
# Costs of a training: the key of run.json, its label, and how its mean over seeds is shown.
COSTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("seconds", N_("training time per seed"), format_duration),
    ("seconds_per_step", N_("seconds per step (median)"), format_number),
    ("peak_memory_mb", N_("peak memory of the first process"), format_memory),
    ("peak_gpu_memory_mb", N_("peak memory of its GPU"), format_memory),
)

PAIR_RESULTS = [path for key in PAIRS for path in (f"before.{key}", key)]
# Results of each stage, and the same of the model before training: paths in metrics.json.
RESULTS: dict[str, list[str]] = {
    "sft": [f"{moment}.{key}" for key in PERPLEXITIES for moment in MOMENTS],
    "reward": PAIR_RESULTS,
    "dpo": PAIR_RESULTS,
    "rlhf": [
        *(f"{model}.{key}" for key in RESPONSES for model in (*INITIAL_MODELS, "rlhf")),
        *(f"wins.rlhf.{initial}.{key}" for initial in MODELS for key in WIN_CRITERIA),
    ],
}


def main(job: Job[Any]) -> None:
    """Write the page and comparison.csv."""
    set_language(job.settings.language)
    stage, _, name = job.spec["name"].partition("/")
    groups = group_by_settings([read_run(job, recipe) for recipe in job.settings.recipes])
    with (job.result / "comparison.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(long_rows(groups, RESULTS[stage]))
    page = Page(
        eyebrow=translate("Comparison of recipes: {stage}", stage=translate(STAGES[stage])),
        title=name,
        sections=[
            result_section(groups, RESULTS[stage]),
            curve_section(groups, stage),
            setting_section(groups),
        ],
        notes=[
            translate(
                "Intervals are 95 % intervals, and n is the number of seeds. The interval of"
                " several seeds is Student's, the interval of their differences is Welch's, and a"
                " single seed has the interval of its evaluation. A single seed does not"
                " distinguish a better recipe from a lucky one."
            ),
            translate("comparison.csv in {folder} has the same numbers.", folder=job.spec["path"]),
        ],
    )
    write_page(job.result / "comparison.html", job.settings.language, page)


def read_run(job: Job[Any], name: str) -> Run:
    """Read a training and its evaluation from the inputs of a job, or from the store."""
    if is_version(name):
        folders = job.options.versions[name]
        folder = folders["training"]
        manifest = json.loads(Path(folder, "manifest.json").read_text())
        path, lineage = manifest["spec"]["path"], merge_lineages([manifest])
        steps = read_version_file(folder, "metrics.jsonl")
        metrics = read_version_file(folders["evaluation"], "metrics.json")
    else:
        path = folder = str(job.inputs[f"training.{name}"])
        lineage = job.lineage
        steps = Path(path, "metrics.jsonl").read_text()
        metrics = (job.inputs[f"evaluation.{name}"] / "metrics.json").read_text()
    record = read_run_record(folder, lineage[path]["spec"])
    placement = placement_of(record["placement"] if record else {})
    lines = [json.loads(line) for line in steps.splitlines()]
    return Run(
        name=name,
        seed=lineage[path]["settings"]["seed"],
        settings=comparable_settings(lineage, path)
        | {f"placement: {key}": getattr(placement, key) for key in PLACEMENT},
        steps=lines,
        metrics=with_metrics_before(json.loads(metrics), lines),
        record=record,
    )


def result_section(groups: Sequence[Group], metrics: Sequence[str]) -> Section:
    """Return the section of results: a figure of each metric, differences, and all numbers."""
    columns = {group.name: group.result for group in groups}
    first, *others = groups
    differences: dict[str, Callable[[str], Figure | None]] = {
        group.name: partial(group.difference, first) for group in others
    }
    tables = [metric_table(translate("Results"), columns, metrics)]
    caption = translate("Differences from {name}", name=first.name)
    difference_table = metric_table(caption, differences, metrics, differences=True)
    if difference_table.rows:
        tables.insert(0, difference_table)
    return Section(
        translate("Results"),
        panels=metric_panels(columns, filter(is_of_trained_model, metrics)),
        caption=translate("Bars are 95 % intervals; points without a bar have none."),
        tables=tables,
    )


def is_of_trained_model(path: str) -> bool:
    """Return whether a metric is of the trained model, and not of the one before training."""
    return path.partition(".")[0] not in ("before", *INITIAL_MODELS)


def curve_section(groups: Sequence[Group], stage: str) -> Section:
    """Return the section of curves by step, with the range over the seeds of each group."""
    caption = translate(
        "A line shows the mean over seeds, and a band reaches from the lowest to the highest seed."
        " Of a single seed, the thin line shows the values and the thick line their moving mean."
    )
    panels = curve_panels(stage, {group.name: group.points for group in groups})
    return Section(translate("Curves"), panels, caption)


def setting_section(groups: Sequence[Group]) -> Section:
    """Return the section of the settings that differ, the seeds, and the costs of a training."""
    differences = setting_differences([group.runs[0].settings for group in groups])
    rows = [[setting, *as_texts(values)] for setting, values in differences.items()]
    seeds = [", ".join(str(run.seed) for run in group.runs) for group in groups]
    rows.append([translate("seed"), *seeds])
    for key, label, format_cost in COSTS:
        costs = [
            [run.record[key] for run in group.runs if run.record and key in run.record]
            for group in groups
        ]
        if any(costs):
            means = [format_cost(statistics.fmean(of)) if of else "" for of in costs]
            rows.append([translate(label), *means])
    note = translate("A setting of an earlier job has the rule of the job as a prefix.")
    table = Table("", ["", *(group.name for group in groups)], rows, note)
    return Section(translate("Settings that differ"), tables=[table])


if __name__ == "__main__":
    run(main)
