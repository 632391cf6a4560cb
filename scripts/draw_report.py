"""Write the report of a recipe: a page of its results, training, data, lineage and costs.

The training record is the same page in Markdown. It contains times and memory, which differ between
two builds.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from snakechat.data.licenses import source_licenses
from snakechat.reporting.costs import job_section, read_runs, run_section, total_cost
from snakechat.reporting.curves import training_section
from snakechat.reporting.data_tables import phase_section, prompt_section
from snakechat.reporting.labels import STAGES
from snakechat.reporting.metric_values import with_metrics_before
from snakechat.reporting.origins import lineage_section
from snakechat.reporting.page_parts import Card, Page, Section, value_table
from snakechat.reporting.page_rendering import write_headline, write_page, write_record
from snakechat.reporting.remarks import remarks_on
from snakechat.reporting.response_examples import response_sections
from snakechat.reporting.result_sections import headline, result_section
from snakechat.reporting.translations import set_language, translate
from snakechat.workflow.job import Job, run


def main(job: Job[Any]) -> None:
    """Write the page, the record, the table of all metrics and the headline."""
    set_language(job.settings.language)
    stage = job.spec["name"].partition("/")[0]
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
    runs = read_runs(job.lineage)
    trainings = {each: str(job.inputs[f"train_{each}"]) for each in stages}
    settings = job.lineage[trainings[stage]]["settings"]
    # The recipe first, then the models behind it.
    order = sorted(stages, key=lambda each: each != stage)
    responses = []
    if stage == "rlhf":
        lines = read_json_lines(job.inputs["evaluate_rlhf"] / "responses.jsonl")
        responses = response_sections(lines, metrics["rlhf"]["num_generations"])
    page = Page(
        eyebrow=translate("Report"),
        title=job.spec["name"],
        cards=headline(stage, metrics[stage]),
        remarks=[
            f"{translate(STAGES[each])}: {remark}"
            for each in stages
            for remark in remarks_on(each, metrics[each])
        ],
        sections=[
            *(result_section(each, metrics[each]) for each in order),
            *responses,
            *(training_section(each, steps[each]) for each in stages),
            phase_section({each: statistics[f"tokens.{each}"] for each in stages}),
            prompt_section(statistics),
            lineage_section(job.lineage, source_licenses(job.lineage, job.options.licenses)),
            Section(translate("Settings"), tables=[value_table("", settings)]),
            job_section(runs),
            *(
                run_section(
                    each,
                    path,
                    job.lineage[path]["settings"],
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
    write_page(job.result / "report.html", job.settings.language, page)
    write_record(job.result, page)
    # The start page of Snakemake's report shows it.
    total = Card(translate("time of all jobs"), total_cost(runs))
    write_headline(job.result / "headline.html", [*page.cards, total])
    write_table(job.result / "metrics.csv", metrics)


def read_json(path: Path) -> dict[str, Any]:
    """Read a .json file."""
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_table(path: Path, metrics: Mapping[str, Any]) -> None:
    """Write all numbers of the evaluations as a table: stage, path, number."""
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("stage", "metric", "value"))
        for stage, of_stage in metrics.items():
            table.writerows([stage, name, f"{value:.10g}"] for name, value in flatten(of_stage))


def flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, number) of each number in nested dicts and lists, names joined by dots."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        if isinstance(value, (dict, list)):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


if __name__ == "__main__":
    run(main)
