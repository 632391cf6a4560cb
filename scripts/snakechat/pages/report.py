"""The report of a recipe: its results, training, data, lineage and costs."""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from snakechat.data.cards import source_licenses
from snakechat.pages.jobs import (
    cost_section,
    lineage_section,
    phase_section,
    prompt_section,
    read_runs,
    run_section,
    total_cost,
)
from snakechat.pages.metrics import STAGES, own_metrics, with_metrics_before
from snakechat.pages.page import Card, Page, Section, value_table
from snakechat.pages.plots import curve_section, points_of
from snakechat.pages.results import (
    benchmark_sections,
    headline,
    remarks_on,
    response_sections,
    result_section,
)
from snakechat.pages.rows import row_section
from snakechat.pages.texts import format_share, translate
from snakechat.workflow.job import Job

# Training rows of each stage that a report shows by token.
SHOWN_ROWS = 2


def report(job: Job[Any]) -> tuple[Page, list[Card], dict[str, Any]]:
    """Return the page of a recipe, the cards of the start page, and the metrics of each stage."""
    stage = job.settings.stage
    # RLHF from a plain model has no SFT model, and with reward functions only, no reward model.
    stages = [each for each in STAGES if f"train_{each}" in job.inputs]
    steps = {
        each: read_json_lines(job.inputs[f"train_{each}"] / "metrics.jsonl") for each in stages
    }
    metrics = {
        each: with_metrics_before(
            read_json(job.inputs[f"evaluate_{each}"] / "metrics.json"), steps[each]
        )
        for each in stages
    }
    statistics = {
        input_name: read_json(folder / "stats.json")
        for input_name, folder in job.inputs.items()
        if input_name.partition(".")[0] in ("records", "rows", "tokens")
    }
    lineage = job.lineage
    runs = read_runs(lineage)
    trainings = {each: job.spec["inputs"][f"train_{each}"]["path"] for each in stages}
    responses = []
    if stage != "reward":
        lines = read_json_lines(job.inputs[f"evaluate_{stage}"] / "responses.jsonl")
        responses = response_sections(lines, metrics[stage].get("num_generations", 1))
    settings = lineage[trainings[stage]]["settings"]
    benchmarks = {
        name.removeprefix("benchmark."): read_json(folder / "metrics.json")
        for name, folder in job.inputs.items()
        if name.startswith("benchmark.")
    }
    page = Page(
        eyebrow=translate("Report"),
        title=f"{stage}/{job.settings.name}",
        cards=headline(stage, metrics[stage]),
        remarks=[
            f"{translate(STAGES[each])}: {remark}"
            for each in stages
            for remark in (
                *remarks_on(each, metrics[each]),
                training_remark(lineage[trainings[each]]),
            )
            if remark
        ],
        sections=[
            # The recipe first, then the models behind it.
            *(
                result_section(each, metrics[each])
                for each in sorted(stages, key=lambda each: each != stage)
            ),
            *benchmark_sections(stage, benchmarks),
            *responses,
            *(
                training_section(each, lineage[trainings[each]]["settings"], steps[each])
                for each in stages
            ),
            *(
                row_section(
                    translate("Training rows: {model}", model=translate(STAGES[each])),
                    job.inputs[f"tokens.{each}"],
                    job.inputs[f"train_{each}"],
                    lineage[trainings[each]]["settings"],
                    SHOWN_ROWS,
                )
                for each in stages
            ),
            phase_section({each: statistics[f"tokens.{each}"] for each in stages}),
            prompt_section(statistics),
            lineage_section(lineage, source_licenses(lineage, job.options.licenses)),
            Section(translate("Settings"), tables=[value_table("", shown_settings(settings))]),
            cost_section(runs),
            *(
                run_section(
                    each,
                    path,
                    lineage[path],
                    record,
                    steps[each],
                    statistics[f"tokens.{each}"]["train"],
                )
                for each, path in trainings.items()
                if (record := runs[path])
            ),
        ],
        notes=[
            translate(
                "All metrics are measured on held-out rows and prompts. Brackets contain 95 %"
                " intervals."
            )
        ],
    )
    return page, [*page.cards, Card(translate("time of all jobs"), total_cost(runs))], metrics


def training_section(
    stage: str, settings: Mapping[str, Any], steps: list[dict[str, Any]]
) -> Section:
    """Return the section of the curves of a training.

    Args: As of own_metrics.
    """
    title = translate("Training: {model}", model=translate(STAGES[stage]))
    caption = translate("Thin lines show the values of the steps, thick lines their moving mean.")
    lines = {
        translate("training"): lambda key: points_of(steps, key),
        translate("held-out rows"): lambda key: points_of(steps, f"eval_{key}"),
    }
    return curve_section(title, caption, stage, lines, own_metrics(stage, settings, steps))


def shown_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in their order; the table of software has the distributions of a command."""
    return {key: settings[key] for key in sorted(settings.keys() - {"distributions"})}


def training_remark(training: Mapping[str, Any]) -> str:
    """Return a remark on the weights that a training saved, or "".

    training: The training in the lineage.
    """
    facts = training["facts"]
    reasons = {
        "learning_rate": translate(
            "the learning rate was 0 until step {step}, which was saved",
            step=facts.get("saved_step"),
        ),
        "rounding": translate(
            "rounding to {dtype} has discarded most of the training, and save_dtype: fp32 keeps it",
            dtype=training["settings"].get("dtype"),
        ),
    }
    if "unchanged_because" not in facts:
        return ""
    return translate(
        "{share} of the trained weights differ from the start: {reason}.",
        share=format_share(facts["changed_weights"]),
        reason=reasons[facts["unchanged_because"]],
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a .json file."""
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a .jsonl file."""
    with path.open() as file:
        return [json.loads(line) for line in file]


def write_metrics(path: Path, metrics: Mapping[str, Any]) -> None:
    """Write all numbers of the evaluations as a table: stage, path, number."""
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("stage", "metric", "value"))
        for stage, of_stage in metrics.items():
            table.writerows([stage, name, f"{value:.10g}"] for name, value in _flatten(of_stage))


def _flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, number) of each number in nested dicts and lists, names joined by dots."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        if isinstance(value, (dict, list)):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
