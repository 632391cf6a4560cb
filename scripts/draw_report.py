"""Write a report: pages of results, data, training, lineage, costs and responses.

A chapter is one HTML file. Costs contain times and memory, which differ between two builds.
"""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from snakechat.reporting.costs import total_cost
from snakechat.reporting.labels import N_
from snakechat.reporting.page_parts import Card, Page
from snakechat.reporting.page_rendering import write_headline, write_page
from snakechat.reporting.report_sections import Report
from snakechat.reporting.translations import translate
from snakechat.workflow.job import Job, run

# The chapters in the order of their numbers. Only reports of RLHF have the last one.
CHAPTERS = {
    "results": N_("Results"),
    "data": N_("Data"),
    "training": N_("Training"),
    "lineage": N_("Lineage"),
    "costs": N_("Costs"),
    "responses": N_("Responses"),
}


def main(job: Job[Any]) -> None:
    """Write the chapters, the tables and the headline."""
    report = Report(job)
    total = Card(translate("time of all jobs"), total_cost(report.runs))
    more: dict[str, dict[str, Any]] = {
        "results": {
            "cards": report.headline(),
            "remarks": report.remarks(),
            "notes": [
                translate(
                    "All metrics are measured on held-out rows and prompts. Brackets contain 95 %"
                    " intervals."
                )
            ],
        },
        "costs": {"cards": [total]},
        "responses": {
            "notes": [
                translate(
                    "The tables show the first sampled response of each model. They show the text"
                    " as it is, including anything that looks like HTML or like the start of a"
                    " turn."
                )
            ]
        },
    }
    for number, (chapter, title) in enumerate(CHAPTERS.items(), 1):
        if chapter == "responses" and report.stage != "rlhf":
            continue
        page = Page(
            eyebrow=translate("Report of {recipe}", recipe=job.spec["name"]),
            title=translate(title),
            sections=getattr(report, chapter)(),
            chapter=number,
            **more.get(chapter, {}),
        )
        write_page(job.result / f"{chapter}.html", job.settings.language, page)
    # The start page of Snakemake's report shows it.
    write_headline(job.result / "costs_and_headline.html", [*report.headline(), total])
    write_table(job.result / "metrics.csv", ("stage", "metric", "value"), report.metrics)
    write_table(job.result / "data.csv", ("data", "statistic", "value"), report.statistics)


def write_table(path: Path, head: tuple[str, ...], values: Mapping[str, Any]) -> None:
    """Write all numbers of nested dicts and lists as a table: first key, path, number."""
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(head)
        for key, of in values.items():
            table.writerows([key, name, f"{value:.10g}"] for name, value in flatten(of))


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
