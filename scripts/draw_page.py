"""Draw a page from results: a report, a comparison, responses side by side or scored pairs.

The training record (record.md) is the report in Markdown. Pages contain times and memory, which
differ between two builds.
"""

import csv
from typing import Any

from snakechat.pages.comparison import COLUMNS, comparison_page, long_rows, read_groups
from snakechat.pages.page import Page, write_headline, write_page, write_record
from snakechat.pages.report import read_json, read_json_lines, report, write_metrics
from snakechat.pages.responses import response_page, score_page
from snakechat.pages.texts import set_language
from snakechat.workflow.job import Job, run


def main(job: Job[Any]) -> None:
    """Write the page, and files with its numbers."""
    set_language(job.settings.language)
    page = PAGES[job.settings.page](job)
    write_page(job.result / f"{job.settings.page}.html", job.settings.language, page)


def draw_report(job: Job[Any]) -> Page:
    """Return the report; write its record, a table of all metrics and the headline.

    The start page of Snakemake's report shows the headline.
    """
    page, cards, metrics = report(job)
    write_record(job.result, page)
    write_headline(job.result / "headline.html", cards)
    write_metrics(job.result / "metrics.csv", metrics)
    return page


def draw_comparison(job: Job[Any]) -> Page:
    """Return the comparison of recipes; write its numbers."""
    stage, groups = job.settings.stage, read_groups(job)
    with (job.result / "comparison.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(long_rows(groups, stage))
    return comparison_page(groups, stage, job.settings.name)


def draw_responses(job: Job[Any]) -> Page:
    """Return the page of responses to the prompts of users."""
    folder = job.inputs["results"]
    settings = job.lineage[job.spec["inputs"]["results"]["path"]]["settings"]
    return response_page(title_of(job), read_json_lines(folder / "responses.jsonl"), settings)


def draw_scores(job: Job[Any]) -> Page:
    """Return the page of scored pairs of responses."""
    folder = job.inputs["results"]
    metrics = read_json(folder / "metrics.json")
    return score_page(title_of(job), read_json_lines(folder / "scores.jsonl"), metrics)


def title_of(job: Job[Any]) -> str:
    """Return the recipe that a page is about."""
    return f"{job.settings.stage}/{job.settings.name}"


PAGES = {
    "report": draw_report,
    "compare": draw_comparison,
    "prompt_eval": draw_responses,
    "rw_eval": draw_scores,
}


if __name__ == "__main__":
    run(main)
