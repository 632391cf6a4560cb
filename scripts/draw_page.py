"""Draw a page from results: a report, a comparison, responses side by side or scored pairs.

The training record (record.md) is the report in Markdown. Pages contain times and memory, which
differ between two builds.
"""

import json
from itertools import groupby
from operator import itemgetter
from typing import Any

from snakechat.pages.comparison import comparison
from snakechat.pages.metrics import (
    format_number,
    label_of,
    read_figure,
    read_json_lines,
    set_language,
    translate,
)
from snakechat.pages.page import TONES, Cell, Page, Section, Table, figure_cell, write_page
from snakechat.pages.report import report
from snakechat.workflow.job import Job, run


def main(job: Job[Any]) -> None:
    """Write the page, and files with its numbers."""
    set_language(job.settings.language)
    page = PAGES[job.settings.page](job)
    write_page(job.result / f"{job.settings.page}.html", job.settings.language, page)


def response_page(job: Job[Any]) -> Page:
    """Return the page of prompt_eval: a table for each prompt, with a row for each model."""
    # Lines of a set, a prompt and a model follow each other.
    lines = read_json_lines(job.inputs["results"] / "responses.jsonl")
    settings = job.lineage[job.spec["inputs"]["results"]["path"]]["settings"]
    head = [translate("model"), translate("greedy"), translate("sampled")]
    sections = []
    for name, of_set in groupby(lines, itemgetter("set")):
        tables = []
        for prompt, of_prompt in groupby(of_set, itemgetter("prompt")):
            rows = [
                [model, *(line["text"].strip() + " […]" * (not line["ended"]) for line in of_model)]
                for model, of_model in groupby(of_prompt, itemgetter("model"))
            ]
            tables.append(Table(prompt, head, rows, has_texts=True))
        sections.append(Section(name, tables=tables))
    title = f"{job.settings.stage}/{job.settings.name}"
    notes = [translate("prompt_eval_note", **settings)]
    return Page(translate("prompt_eval"), title, sections, notes=notes)


def score_page(job: Job[Any]) -> Page:
    """Return the page of rw_eval: a table for each set, with a row for each pair.

    A positive margin is better, a negative one worse.
    """
    # Lines of a set follow each other.
    lines = read_json_lines(job.inputs["results"] / "scores.jsonl")
    metrics = json.loads((job.inputs["results"] / "metrics.json").read_text())
    names = ("prompt", "chosen", "score", "rejected", "score", "margin", "base_margin")
    sections = []
    for name, of_set in groupby(lines, itemgetter("set")):
        rows = []
        for number, line in enumerate(of_set, start=1):
            chosen, rejected, base = (
                Cell(format_number(line[key]))
                for key in ("chosen_score", "rejected_score", "base_margin")
            )
            sign = (line["margin"] > 0) - (line["margin"] < 0)
            margin = Cell(format_number(line["margin"], signed=True), tone=TONES[sign])
            texts = line["prompt"], line["chosen"], chosen, line["rejected"], rejected
            rows.append([str(number), *texts, margin, base])
        table = Table("", ["", *map(translate, names)], rows, has_texts=True)
        sections.append(Section(name, tables=[table]))
    cards = {
        label_of(path): figure_cell(path, figure)
        for path in ("accuracy", "base.accuracy", "ties")
        if (figure := read_figure(metrics, path))
    }
    title = f"{job.settings.stage}/{job.settings.name}"
    return Page(translate("rw_eval"), title, sections, cards)


PAGES = {
    "report": report,
    "compare": comparison,
    "prompt_eval": response_page,
    "rw_eval": score_page,
}


if __name__ == "__main__":
    run(main)
