"""The report of a recipe: its results, training, data, lineage and costs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snakechat.data.cards import source_licenses
from snakechat.pages import jobs, metrics, results
from snakechat.pages.jobs import Training
from snakechat.pages.page import (
    Cell,
    Page,
    Section,
    value_table,
    write_csv,
    write_headline,
    write_record,
)
from snakechat.pages.plots import curve_panels, points_of
from snakechat.pages.responses import response_sections
from snakechat.pages.rows import TokenizedRows, row_tables
from snakechat.pages.texts import NAMES, translate
from snakechat.workflow.job import Job

# Training rows of each stage that a report shows by token.
SHOWN_ROWS = 2


def report(job: Job[Any]) -> Page:
    """Return the page of a recipe; write its record, a table of all metrics and the headline.

    The start page of Snakemake's report shows the headline.
    """
    stage, lineage, inputs = job.settings.stage, job.lineage, job.inputs
    runs = jobs.read_runs(lineage)
    trainings: list[Training] = []
    # RLHF from a plain model has no SFT model, and with reward functions only, no reward model.
    for each in (each for each in NAMES["stages"] if f"train_{each}" in inputs):
        path = job.spec["inputs"][f"train_{each}"]["path"]
        settings, facts = (lineage[path][key] for key in ("settings", "facts"))
        steps = metrics.read_json_lines(inputs[f"train_{each}"] / "metrics.jsonl")
        evaluation = metrics.read_json(inputs[f"evaluate_{each}"] / "metrics.json")
        tokens = metrics.read_json(inputs[f"tokens.{each}"] / "stats.json")
        trainings.append(
            Training(
                *(each, path, settings, facts, steps),
                *(metrics.with_metrics_before(evaluation, steps), runs[path] or {}, tokens),
            )
        )
    # The recipe first, then the models behind it.
    own, *others = sorted(trainings, key=lambda training: training.stage != stage)
    responses = []
    if stage != "reward":
        lines = metrics.read_json_lines(inputs[f"evaluate_{stage}"] / "responses.jsonl")
        responses = response_sections(lines, own.metrics.get("num_generations", 1))
    datasets = {
        name.removeprefix("records."): metrics.read_json(folder / "stats.json")
        for name, folder in inputs.items()
        if name.startswith("records.")
    }
    page = Page(
        eyebrow=translate("report"),
        title=f"{stage}/{job.settings.name}",
        cards=results.headline(stage, own.metrics),
        remarks=[f"{of.title}: {remark}" for of in trainings for remark in results.remarks_on(of)],
        sections=[
            *(results.result_section(of.stage, of.metrics) for of in (own, *others)),
            *results.benchmark_sections(stage, metrics.read_benchmarks(inputs)),
            *responses,
            *(training_section(of, inputs) for of in trainings),
            jobs.row_section(trainings, datasets),
            jobs.job_section(lineage, source_licenses(lineage, job.options.licenses), runs),
        ],
        notes=[translate("report_note")],
    )
    write_record(job.result, page)
    cost = {translate("total_time"): Cell(jobs.total_cost(runs))}
    write_headline(job.result / "headline.html", {**page.cards, **cost})
    numbers = [
        (of.stage, name, f"{value:.10g}")
        for of in trainings
        for name, value in metrics.numbers_of(of.metrics)
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
        panels=curve_panels(metrics.curve_labels(stage, settings, steps), lines),
        caption=translate("curves_note"),
        tables=[
            *([jobs.run_table(training)] if training.run else []),
            *row_tables(rows, range(min(SHOWN_ROWS, len(rows)))),
        ],
        folded=[value_table(name, dict(sorted(of.items()))) for name, of in folded.items() if of],
    )
