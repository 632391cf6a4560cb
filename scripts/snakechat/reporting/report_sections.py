"""The sections of a report, or of a training record: results, data, training, lineage, costs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snakechat.data.licenses import source_licenses
from snakechat.reporting.costs import job_section, read_runs, run_section
from snakechat.reporting.curves import curve_section
from snakechat.reporting.data_tables import phase_section, prompt_section
from snakechat.reporting.formatting import format_number
from snakechat.reporting.labels import CURVES, N_, STAGES
from snakechat.reporting.origins import describe_origin
from snakechat.reporting.page_parts import Card, Section, Table, value_table
from snakechat.reporting.remarks import remarks_on
from snakechat.reporting.response_examples import response_sections
from snakechat.reporting.result_sections import headline, result_section
from snakechat.reporting.training_tables import training_tables
from snakechat.reporting.translations import set_language, translate
from snakechat.workflow.job import Job
from snakechat.workflow.lineage import lineage_columns

# The columns of the lineage.
LINEAGE = (N_("job"), N_("rule"), N_("inputs"), N_("source"), N_("spec"), N_("accepted changes"))


class Report:
    """What is known of a recipe and of the recipes before it.

    Attributes:
        stage, name: Stage and name of the recipe.
        stages: The recipe's stage and those before it whose results are shown.
        metrics: metrics.json of their evaluations.
        steps: The lines of metrics.jsonl of their trainings.
        statistics: stats.json of the data, by input name (records.DATASET, ..., tokens.STAGE).
        runs: The records of the runs of all jobs, by path.
    """

    def __init__(self, job: Job[Any]) -> None:
        self.job = job
        set_language(job.settings.language)
        self.stage, _, self.name = job.spec["name"].partition("/")
        # RLHF from a plain model has no SFT model, and with reward functions only, no reward model.
        self.stages = [stage for stage in STAGES if f"train_{stage}" in job.inputs]
        self.metrics: dict[str, dict[str, Any]] = {
            stage: json.loads((job.inputs[f"evaluate_{stage}"] / "metrics.json").read_text())
            for stage in self.stages
        }
        self.steps = {
            stage: read_json_lines(job.inputs[f"train_{stage}"] / "metrics.jsonl")
            for stage in self.stages
        }
        self.statistics: dict[str, dict[str, Any]] = {
            name: json.loads((folder / "stats.json").read_text())
            for name, folder in job.inputs.items()
            if name.partition(".")[0] in ("records", "rows", "tokens")
        }
        self.runs = read_runs(job.lineage)

    def headline(self) -> list[Card]:
        """Return the main results of the recipe."""
        return headline(self.stage, self.metrics[self.stage])

    def remarks(self) -> list[str]:
        """Return remarks on the results."""
        return [
            f"{translate(STAGES[stage])}: {remark}"
            for stage, metrics in self.metrics.items()
            for remark in remarks_on(stage, metrics)
        ]

    def results(self) -> list[Section]:
        """Return the results of the recipe, then the results of the models behind it."""
        order = sorted(self.stages, key=lambda stage: stage != self.stage)
        settings = self.job.lineage[f"output/{self.stage}/{self.name}"]["settings"]
        return [
            *(result_section(stage, self.metrics[stage]) for stage in order),
            Section(translate("Settings"), tables=[value_table("", settings)]),
        ]

    def data(self) -> list[Section]:
        """Return the statistics of the data."""
        phases = {stage: self.statistics[f"tokens.{stage}"] for stage in self.stages}
        return [
            phase_section(phases),
            *prompt_section(self.statistics),
        ]

    def training(self) -> list[Section]:
        """Return the curves of each training, its held-out metrics and its epochs."""
        return [
            curve_section(translate(STAGES[stage]), steps, CURVES[stage])._replace(
                tables=self.training_tables(stage)
            )
            for stage, steps in self.steps.items()
        ]

    def training_tables(self, stage: str) -> list[Table]:
        """Return the tables of the training of a stage."""
        settings = self.job.lineage[str(self.job.inputs[f"train_{stage}"])]["settings"]
        num_rows = self.statistics[f"tokens.{stage}"]["train"]["rows"]
        return training_tables(stage, settings, self.metrics[stage], self.steps[stage], num_rows)

    def lineage(self) -> list[Section]:
        """Return the table of the jobs that the report was made from, each below its inputs."""
        lineage = self.job.lineage
        licenses = source_licenses(lineage, self.job.options.licenses)
        rows = [
            [
                path.removeprefix("output/"),
                lineage[path]["rule"],
                ", ".join(each.removeprefix("output/") for each in lineage[path]["inputs"]),
                describe_origin(lineage[path], licenses.get(path)),
                lineage[path]["spec"][:16],
                accepted_changes(lineage[path]),
            ]
            for column in lineage_columns(lineage)
            for path in column
        ]
        note = translate(
            "A spec is the digest of a job's settings, code and inputs. The table shows its first"
            " 16 digits."
        )
        title = translate("{count} jobs", count=format_number(len(lineage)))
        table = Table("", list(map(translate, LINEAGE)), rows, note, has_texts=True)
        return [Section(title, tables=[table])]

    def costs(self) -> list[Section]:
        """Return times and memory of all jobs, and the throughput of the trainings."""
        sections = [job_section(self.runs)]
        for stage, steps in self.steps.items():
            path = str(self.job.inputs[f"train_{stage}"])
            train = self.statistics[f"tokens.{stage}"]["train"]
            if run := self.runs[path]:
                settings = self.job.lineage[path]["settings"]
                sections.append(run_section(stage, path, settings, run, steps, train))
        return sections

    def responses(self) -> list[Section]:
        """Return responses of all models side by side."""
        lines = read_json_lines(self.job.inputs["evaluate_rlhf"] / "responses.jsonl")
        count = self.metrics["rlhf"]["num_generations"]
        return response_sections(lines, count)


def accepted_changes(job: Mapping[str, Any]) -> str:
    """Describe the changes after which a result was accepted (scripts/accept.py)."""
    return ", ".join(
        f"{entry['date']}: {entry['because']} ({'; '.join(entry['changes'])})"
        for entry in job.get("accepted", ())
    )


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
