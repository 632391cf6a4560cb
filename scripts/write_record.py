"""Write a training record: a page about one training, with its curves, as HTML and as Markdown.

It contains times, memory and the machine (run.json), which differ between two builds.
"""

from typing import Any

from snakechat.reporting.page_parts import Page
from snakechat.reporting.page_rendering import write_page, write_record
from snakechat.reporting.report_sections import Report
from snakechat.reporting.translations import translate
from snakechat.workflow.job import Job, run


def main(job: Job[Any]) -> None:
    """Write the page in both forms."""
    report = Report(job)
    training = [
        section._replace(title=translate("Training: {model}", model=section.title))
        for section in report.training()
    ]
    page = Page(
        eyebrow=translate("Training record"),
        title=job.spec["name"],
        cards=report.headline(),
        remarks=report.remarks(),
        sections=[*training, *report.results(), *report.data(), *report.costs()],
    )
    write_page(job.result / "record.html", job.settings.language, page)
    write_record(job.result, page)


if __name__ == "__main__":
    run(main)
