"""Write a report: pages of results, data, training, lineage, costs and responses.

A chapter is one HTML file. Costs contain times and memory, which differ between two builds.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from snakechat.data.licenses import source_licenses
from snakechat.reporting.costs import cost_sections, read_runs, total_cost
from snakechat.reporting.curves import curve_section
from snakechat.reporting.data_plots import data_sections
from snakechat.reporting.formatting import format_significant
from snakechat.reporting.html_pages import write_html, write_sections
from snakechat.reporting.interpretation import rlhf_remarks
from snakechat.reporting.intervals import proportion_interval
from snakechat.reporting.labels import CURVES, N_
from snakechat.reporting.origins import describe_origin
from snakechat.reporting.page_parts import Card, Section, Table
from snakechat.reporting.plots import Panel, draw_calibration, draw_columns
from snakechat.reporting.recipe_rows import recipe_table
from snakechat.reporting.response_examples import write_responses
from snakechat.reporting.results import headline, result_sections
from snakechat.reporting.translations import Translate, translator
from snakechat.workflow.job import Job, run
from snakechat.workflow.lineage import lineage_columns

# In the order of training, and as titles of sections.
STAGES = {
    "sft": N_("SFT"),
    "dpo": N_("DPO"),
    "reward": N_("Reward model"),
    "rlhf": N_("RLHF"),
}
# The sections of a step of RLHF in times.jsonl.
SECTIONS = {
    "generate": N_("generating responses (s)"),
    "score": N_("scoring responses (s)"),
    "train": N_("updating the models (s)"),
}
# Number and title of each chapter. Only reports of RLHF have the last one.
CHAPTERS = {
    "results": (1, N_("Results")),
    "data": (2, N_("Data")),
    "training": (3, N_("Training")),
    "lineage": (4, N_("Lineage")),
    "costs": (5, N_("Costs")),
    "responses": (6, N_("Responses")),
}


def main(job: Job[Any]) -> None:
    """Write the chapters, the tables and the headline."""
    report = Report(job)
    report.write_results()
    report.write_data()
    report.write_training()
    report.write_lineage()
    report.write_costs()
    if report.stage == "rlhf":
        report.write_responses()


class Report:
    """The report of a recipe.

    Attributes:
        stage, name: Stage and name of the recipe.
        stages: The recipe's stage and those before it whose results are shown.
        metrics: metrics.json of their evaluations.
        licenses: The licence of each external dataset and model, by path.
    """

    def __init__(self, job: Job[Any]) -> None:
        self.job, self.folder, self.language = job, job.result, job.settings.language
        self.translate = translator(self.language)
        self.stage, _, self.name = job.spec["name"].partition("/")
        self.path = f"output/{self.stage}/{self.name}"
        # RLHF from a plain model has no SFT model, and with reward functions only, no reward model.
        self.licenses = source_licenses(job.lineage, job.placement["licenses"])
        self.stages = [stage for stage in STAGES if f"train_{stage}" in job.inputs]
        self.metrics: dict[str, dict[str, Any]] = {
            stage: json.loads((job.inputs[f"evaluate_{stage}"] / "metrics.json").read_text())
            for stage in self.stages
        }

    def header(self, chapter: str) -> dict[str, Any]:
        """Return the header of a chapter."""
        number, title = CHAPTERS[chapter]
        return {
            "chapter": number,
            "title": self.translate(title),
            "eyebrow": self.translate(
                "Report of {recipe}", recipe=self.path.removeprefix("output/")
            ),
        }

    def write_results(self) -> None:
        """Write the results of the recipe, then those of the models that it was made from."""
        order = sorted(self.stages, key=lambda stage: stage != self.stage)
        sections = [
            section
            for stage in order
            for section in result_sections(stage, self.metrics[stage], self.translate)
        ]
        recipe = recipe_table(self.path, self.job.lineage, self.licenses, self.translate)
        write_sections(
            self.folder / "results.html",
            self.language,
            **self.header("results"),
            cards=headline(self.stage, self.metrics[self.stage], self.translate),
            remarks=list(rlhf_remarks(self.metrics["rlhf"], self.translate))
            if self.stage == "rlhf"
            else [],
            sections=[
                *sections,
                Section(self.translate("Recipe"), shown_tables=[recipe]),
            ],
            notes=[
                self.translate(
                    "All metrics are of held-out rows and prompts. Brackets contain 95 % intervals."
                )
            ],
        )
        write_metrics(self.folder / "metrics.csv", self.metrics)

    def write_data(self) -> None:
        """Write the statistics of the data."""
        statistics = read_statistics(self.job)
        write_sections(
            self.folder / "data.html",
            self.language,
            **self.header("data"),
            sections=data_sections(statistics, tuple(STAGES), self.translate),
        )
        write_statistics(self.folder / "data.csv", statistics)

    def write_training(self) -> None:
        """Write the curves of each training, and the calibration of models of pairs."""
        sections = []
        for stage in self.stages:
            steps = read_json_lines(self.job.inputs[f"train_{stage}"] / "metrics.jsonl")
            title = self.translate(STAGES[stage])
            sections.append(curve_section(title, steps, CURVES[stage], self.translate))
            if "calibration" in self.metrics[stage]:
                sections.append(calibration_section(title, self.metrics[stage], self.translate))
        write_sections(
            self.folder / "training.html",
            self.language,
            **self.header("training"),
            sections=sections,
        )

    def write_lineage(self) -> None:
        """Write the table of the jobs that the report was made from, each below its inputs."""
        translate, lineage = self.translate, self.job.lineage
        rows = [
            [
                path.removeprefix("output/"),
                lineage[path]["rule"],
                ", ".join(each.removeprefix("output/") for each in lineage[path]["inputs"]),
                describe_origin(lineage[path], self.licenses.get(path), translate),
                lineage[path]["spec"][:16],
            ]
            for column in lineage_columns(lineage)
            for path in column
        ]
        head = [
            translate("job"),
            translate("rule"),
            translate("inputs"),
            translate("source"),
            translate("spec"),
        ]
        note = translate(
            "A spec is the digest of the settings, the code and the inputs of a job: its first 16"
            " digits."
        )
        title = translate("{count} jobs", count=format_significant(len(lineage)))
        table = Table("", head, rows, note, stack=True)
        write_sections(
            self.folder / "lineage.html",
            self.language,
            **self.header("lineage"),
            sections=[Section(title, shown_tables=[table])],
        )

    def write_costs(self) -> None:
        """Write times and memory, and the headline, which names the total time."""
        translate, runs = self.translate, read_runs(self.job.lineage)
        total = Card(translate("time of all jobs"), total_cost(runs))
        sections = cost_sections(runs, self.path, self.throughput(), translate)
        write_sections(
            self.folder / "costs.html",
            self.language,
            **self.header("costs"),
            cards=[total],
            sections=sections,
        )
        # The start page of Snakemake's report shows it.
        write_html(
            self.folder / "costs_and_headline.html",
            "report_headline.html",
            self.language,
            cards=[*headline(self.stage, self.metrics[self.stage], translate), total],
        )

    def throughput(self) -> Section:
        """Return the throughput of each training by step, from its log if it exists."""
        translate, panels, caption = self.translate, [], ""
        for stage in self.stages:
            rule = f"train_{stage}"
            log = self.job.inputs[rule] / "times.jsonl"
            lines = read_json_lines(log) if log.exists() else []
            # A resumed training repeats steps; the last time counts.
            steps = list({line["step"]: line for line in lines}.values())
            curves = {"tokens_per_second": N_("tokens per second")}
            curves |= SECTIONS if stage == "rlhf" else {}
            title = translate(STAGES[stage])
            section = curve_section(title, steps, curves, translate)
            panels += [panel._replace(title=f"{title}: {panel.title}") for panel in section.panels]
        if panels:
            caption = translate(
                "Tokens that are trained on: for pairs, the prompt once and both responses; for"
                " RLHF, the responses, including the time for generating and scoring them. Thick"
                " lines are moving means."
            )
        return Section(translate("Throughput"), panels=panels, caption=caption)

    def write_responses(self) -> None:
        """Write responses of all models side by side."""
        responses = read_json_lines(self.job.inputs["evaluate_rlhf"] / "responses.jsonl")
        write_responses(
            self.folder / "responses.html",
            self.language,
            responses,
            self.metrics["rlhf"]["num_generations"],
            **self.header("responses"),
        )


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_statistics(job: Job[Any]) -> dict[str, dict[str, Any]]:
    """Read stats.json of each data job, by input name (records.DATASET, ..., tokens.STAGE)."""
    return {
        name: json.loads((folder / "stats.json").read_text())
        for name, folder in job.inputs.items()
        if name.partition(".")[0] in ("records", "rows", "tokens")
    }


def write_metrics(path: Path, metrics: dict[str, dict[str, Any]]) -> None:
    """Write all metrics of the evaluations as a table."""
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["stage", "metric", "value"])
        for stage, values in metrics.items():
            table.writerows([stage, name, f"{value:.10g}"] for name, value in flatten(values))


def write_statistics(path: Path, statistics: dict[str, dict[str, Any]]) -> None:
    """Write all statistics of the data as a table."""
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["dataset or phase", "step", "statistic", "value"])
        for name, values in statistics.items():
            step, _, of = name.partition(".")
            table.writerows([of, step, key, f"{value:.10g}"] for key, value in flatten(values))


def flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield (name, number) of each number in nested dicts and lists, names joined by dots."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        if isinstance(value, (dict, list)):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def calibration_section(title: str, metrics: dict[str, Any], translate: Translate) -> Section:
    """Return the section of the accuracy of a model of pairs by its confidence."""
    bins = [
        (
            of["confidence"],
            (of["accuracy"], proportion_interval(of["accuracy"], of["pairs"])),
        )
        for of in metrics["calibration"]
    ]
    counts = [(of["confidence"], of["pairs"]) for of in metrics["calibration"]]
    confidence, accuracy = translate("confidence"), translate("accuracy")
    titles = translate("accuracy by confidence"), translate("held-out pairs by confidence")
    panels = [
        Panel(titles[0], draw_calibration(f"{title}: {titles[0]}", bins, confidence, accuracy)),
        Panel(titles[1], draw_columns(f"{title}: {titles[1]}", counts, confidence)),
    ]
    caption = translate(
        "Confidence is the sigmoid of the difference of the two scores. Above the dashed line the"
        " model is underconfident, below it is overconfident. Bars are 95 % intervals (Wilson); few"
        " pairs have wide ones."
    )
    return Section(translate("Calibration: {model}", model=title), panels=panels, caption=caption)


if __name__ == "__main__":
    run(main)
