"""The report of a recipe: its results, training, data, lineage and costs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snakechat.data.cards import source_licenses
from snakechat.pages.jobs import (
    Training,
    job_section,
    read_runs,
    row_section,
    run_table,
    total_cost,
)
from snakechat.pages.metrics import (
    numbers_of,
    own_metrics,
    read_benchmarks,
    read_json,
    read_json_lines,
    with_metrics_before,
)
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
from snakechat.pages.results import benchmark_sections, headline, remarks_on, result_section
from snakechat.pages.rows import TokenizedRows, row_tables
from snakechat.pages.texts import NAMES, format_share, translate
from snakechat.workflow.job import Job

# Training rows of each stage that a report shows by token.
SHOWN_ROWS = 2


def report(job: Job[Any]) -> Page:
    """Return the page of a recipe; write its record, a table of all metrics and the headline.

    The start page of Snakemake's report shows the headline.
    """
    stage, lineage = job.settings.stage, job.lineage
    statistics = {
        name: read_json(folder / "stats.json")
        for name, folder in job.inputs.items()
        if name.startswith(("records.", "tokens."))
    }
    runs = read_runs(lineage)
    trainings = {}
    # RLHF from a plain model has no SFT model, and with reward functions only, no reward model.
    for each in (each for each in NAMES["stages"] if f"train_{each}" in job.inputs):
        path = job.spec["inputs"][f"train_{each}"]["path"]
        steps = read_json_lines(job.inputs[f"train_{each}"] / "metrics.jsonl")
        metrics = read_json(job.inputs[f"evaluate_{each}"] / "metrics.json")
        tokens = statistics[f"tokens.{each}"]
        trainings[each] = Training(
            *(each, path, lineage[path], steps),
            *(with_metrics_before(metrics, steps), tokens, runs[path] or {}),
        )
    own, all_trainings = trainings[stage], [*trainings.values()]
    responses = []
    if stage != "reward":
        lines = read_json_lines(job.inputs[f"evaluate_{stage}"] / "responses.jsonl")
        responses = response_sections(lines, own.metrics.get("num_generations", 1))
    page = Page(
        eyebrow=translate("Report"),
        title=f"{stage}/{job.settings.name}",
        cards=headline(stage, own.metrics),
        remarks=[
            f"{of.title}: {remark}"
            for of in all_trainings
            for remark in (*remarks_on(of.stage, of.metrics), training_remark(of.job))
            if remark
        ],
        sections=[
            # The recipe first, then the models behind it.
            *(
                result_section(of.stage, of.metrics)
                for of in sorted(all_trainings, key=lambda of: of is not own)
            ),
            *benchmark_sections(stage, read_benchmarks(job.inputs)),
            *responses,
            *(training_section(of, job.inputs) for of in all_trainings),
            row_section(all_trainings, statistics),
            job_section(lineage, source_licenses(lineage, job.options.licenses), runs),
        ],
        notes=[
            translate(
                "All metrics are measured on held-out rows and prompts. Brackets contain 95 %"
                " intervals."
            )
        ],
    )
    write_record(job.result, page)
    cost = {translate("time of all jobs"): Cell(total_cost(runs))}
    write_headline(job.result / "headline.html", {**page.cards, **cost})
    numbers = [
        (of.stage, name, f"{value:.10g}")
        for of in all_trainings
        for name, value in numbers_of(of.metrics)
    ]
    write_csv(job.result / "metrics.csv", ("stage", "metric", "value"), numbers)
    return page


def training_section(training: Training, folders: Mapping[str, Path]) -> Section:
    """Return the section of a training: curves, the run, the first rows, settings and software.

    folders: The inputs of the job.
    """
    stage, steps, run = training.stage, training.steps, training.run
    settings = training.job["settings"]
    lines = {
        translate("training"): lambda key: points_of(steps, key),
        translate("held-out rows"): lambda key: points_of(steps, f"eval_{key}"),
    }
    tokens, model = (folders[f"{key}{stage}"] for key in ("tokens.", "train_"))
    rows = TokenizedRows(tokens, "train", model, settings.get("train_on") == "all_tokens")
    folded = {
        # The table of software has the distributions of a command.
        translate("Settings"): {k: v for k, v in settings.items() if k != "distributions"},
        translate("Placement"): run.get("placement", {}),
        translate("Software"): run.get("versions", {}),
    }
    return Section(
        translate("Training: {model}", model=training.title),
        panels=curve_panels(stage, lines, own_metrics(stage, settings, steps)),
        caption=translate("Thin lines show the values of the steps, thick lines means of several."),
        tables=[
            *([run_table(training)] if run else []),
            *row_tables(rows, range(min(SHOWN_ROWS, len(rows)))),
        ],
        folded=[value_table(name, dict(sorted(of.items()))) for name, of in folded.items() if of],
    )


def training_remark(training: Mapping[str, Any]) -> str:
    """Return a remark on the weights that a training saved, or "".

    training: The training in the lineage.
    """
    facts = training["facts"]
    if "unchanged_because" not in facts:
        return ""
    if facts["unchanged_because"] == "learning_rate":
        reason = translate(
            "the learning rate was 0 until step {step}, which was saved", step=facts["saved_step"]
        )
    else:
        reason = translate(
            "rounding to {dtype} has discarded most of the training, and save_dtype: fp32 keeps it",
            dtype=training["settings"]["dtype"],
        )
    return translate(
        "{share} of the trained weights differ from the start: {reason}.",
        share=format_share(facts["changed_weights"]),
        reason=reason,
    )
