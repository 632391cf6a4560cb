"""Draw a page from results: a report, a comparison, responses side by side or scored pairs.

The training record (record.md) is the report in Markdown. Pages contain times and memory, which
differ between two builds.
"""

from typing import Any

from snakechat.pages.comparison import comparison
from snakechat.pages.metrics import read_json, read_json_lines
from snakechat.pages.page import Page, write_page
from snakechat.pages.report import report
from snakechat.pages.responses import response_page, score_page
from snakechat.pages.texts import set_language
from snakechat.workflow.job import Job, run


def main(job: Job[Any]) -> None:
    """Write the page, and files with its numbers."""
    set_language(job.settings.language)
    page = PAGES[job.settings.page](job)
    write_page(job.result / f"{job.settings.page}.html", job.settings.language, page)


def draw_responses(job: Job[Any]) -> Page:
    """Return the page of responses to the prompts of users."""
    lines = read_json_lines(job.inputs["results"] / "responses.jsonl")
    settings = job.lineage[job.spec["inputs"]["results"]["path"]]["settings"]
    return response_page(f"{job.settings.stage}/{job.settings.name}", lines, settings)


def draw_scores(job: Job[Any]) -> Page:
    """Return the page of scored pairs of responses."""
    lines = read_json_lines(job.inputs["results"] / "scores.jsonl")
    metrics = read_json(job.inputs["results"] / "metrics.json")
    return score_page(f"{job.settings.stage}/{job.settings.name}", lines, metrics)


PAGES = {
    "report": report,
    "compare": comparison,
    "prompt_eval": draw_responses,
    "rw_eval": draw_scores,
}


if __name__ == "__main__":
    run(main)
