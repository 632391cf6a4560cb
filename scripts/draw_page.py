"""Draw a page from results: a report, a comparison, responses side by side or scored pairs.

The training record (record.md) is the report in Markdown. Pages contain times and memory, which
differ between two builds.
"""

from typing import Any

from snakechat.pages.comparison import comparison
from snakechat.pages.metrics import set_language
from snakechat.pages.page import write_page
from snakechat.pages.report import report
from snakechat.pages.rows import response_page, score_page
from snakechat.workflow.job import Job, run


def main(job: Job[Any]) -> None:
    """Write the page, and files with its numbers."""
    set_language(job.settings.language)
    page = PAGES[job.settings.page](job)
    write_page(job.result / f"{job.settings.page}.html", job.settings.language, page)


PAGES = {
    "report": report,
    "compare": comparison,
    "prompt_eval": response_page,
    "rw_eval": score_page,
}


if __name__ == "__main__":
    run(main)
