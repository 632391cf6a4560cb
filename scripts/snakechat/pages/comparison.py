"""The page that compares recipes of a stage: results, curves, and the settings that differ.

Recipes that differ only in their seed are one column: mean and interval over the seeds. Those with
another ZeRO stage are columns of their own, and so are training logs of DeepSpeed-Chat.
comparison.csv has the same numbers.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.evaluation.comparisons import difference_interval, initial_model, mean_interval
from snakechat.pages.metrics import (
    Figure,
    as_text,
    benchmark_paths,
    is_fraction,
    name_of,
    read_benchmarks,
    read_figure,
    result_paths,
    run_value,
    translate,
)
from snakechat.pages.page import Page, Section, Table, metric_table, write_csv
from snakechat.pages.trainings import Points, Training, curves, points_of, read_log, read_training
from snakechat.workflow.job import Job
from snakechat.workflow.manifest import MANIFEST, Lineage, merge_lineages, result_id
from snakechat.workflow.processes import Placement

# Columns of comparison.csv.
COLUMNS = ("group", "seed", "metric", "value", "low", "high", "n")
# Keys of a placement that are compared like settings: trainings at each ZeRO stage, say.
PLACEMENT = ("zero_stage", "critic_zero_stage", "offload")
# Costs of a training, by their keys in run.json.
COSTS = ("seconds", "seconds_per_step", "rows_per_second", "peak_memory_mb", "peak_gpu_memory_mb")
# Rules whose settings follow from the settings of a training.
DERIVED = ("tokenize_", "compute_reference")
# Rules of which each makes a dataset or a base model: their settings belong to one job.
SOURCES = {
    **dict.fromkeys(("import_dataset", "label_pairs", "select_responses"), "dataset"),
    **dict.fromkeys(("init_model", "fetch_model"), "model"),
}


class Group(NamedTuple):
    """Runs that differ only in their seed."""

    name: str
    runs: list[Training]

    @property
    def seeds(self) -> list[int | None]:
        """The seeds of the runs; None of a command that does not name it."""
        return [run.settings.get("seed") for run in self.runs]

    def points(self, key: str) -> Points:
        """Return (step, value) of a metric, of all runs, at the steps that all of them have."""
        curves = [dict(points_of(run.steps, key)) for run in self.runs]
        shared = set(curves[0]).intersection(*curves)
        return [(step, curve[step]) for curve in curves for step in sorted(shared)]

    def figures(self, path: str) -> list[Figure]:
        """Return a metric of each run; nothing if a run does not have it."""
        found = [*filter(None, (read_figure(run.metrics, path) for run in self.runs))]
        return found if len(found) == len(self.runs) else []

    def result(self, path: str) -> Figure | None:
        """Return a metric with its interval, over seeds if there are several, or None."""
        figures = self.figures(path)
        values = [figure.value for figure in figures]
        if len(set(values)) < 2:
            # Equal values say nothing about the variance.
            return figures[0]._replace(n=len(values)) if figures else None
        interval = mean_interval(values, 0, 1) if is_fraction(path) else mean_interval(values)
        return Figure(statistics.fmean(values), interval, len(values))

    def difference(self, other: "Group", path: str) -> Figure | None:
        """Return the difference of a metric from another group, if both have several seeds.

        n: seeds of the smaller group.
        """
        ours, theirs = ([each.value for each in group.figures(path)] for group in (self, other))
        n = min(len(ours), len(theirs))
        if n < 2:
            return None
        mean, other_mean = statistics.fmean(ours), statistics.fmean(theirs)
        interval = difference_interval(ours, theirs)
        return Figure(mean - other_mean, interval, n, scale=abs(other_mean))


def comparison(job: Job[Any]) -> Page:
    """Return the page of a comparison; write its numbers."""
    stage, name = job.settings.stage, job.settings.name
    runs = [_read_run(job, recipe) for recipe in job.settings.recipes]
    # Columns of a sweep name what differs.
    groups = group_by_settings(runs, by_differences="-vs-" not in name)
    initials = dict.fromkeys(initial_model(run.metrics) for run in runs if "wins" in run.metrics)
    benchmarks = dict.fromkeys(path for run in runs for path in benchmark_paths(run.metrics))
    metrics = [*result_paths(stage, initials), *benchmarks]
    write_csv(job.result / "comparison.csv", COLUMNS, long_rows(groups, metrics))
    labels = {key: label for run in runs for key, label in run.curve_labels().items()}
    lines = {group.name: group.points for group in groups}
    logs = ", ".join(run.name for run in runs if not run.compared)
    return Page(
        translate("comparison", stage=name_of("stages", stage)),
        name,
        sections=[
            Section(translate("results"), tables=result_tables(groups, metrics)),
            Section(translate("curves"), curves(labels, lines)),
            Section(translate("differing_settings"), tables=[setting_table(groups)]),
        ],
        notes=[
            translate("comparison_note"),
            *([translate("logs_note", names=logs)] if logs else []),
            translate("csv_note", folder=f"output/pages/compare/{stage}/{name}"),
        ],
    )


def _read_run(job: Job[Any], name: str) -> Training:
    """Read a training and its evaluation from the inputs of a job, or from the store."""
    stage, version = job.settings.stage, job.options.versions.get(name, {})
    if "log" in version:
        return read_log(Path(version["log"]), name, stage)
    folder, evaluation = (
        version.get(kind) or job.inputs[f"{kind}.{name}"] for kind in ("training", "evaluation")
    )
    manifest = json.loads(Path(folder, MANIFEST).read_text())
    lineage, result = merge_lineages([manifest]), result_id(manifest)
    training = read_training(stage, name, lineage[result], folder, evaluation)
    settings, run = training.settings, dict(training.run)
    batch = settings.get("rollout_batch_size", settings.get("global_batch_size"))
    if batch and "seconds_per_step" in run:
        run["rows_per_second"] = batch / run["seconds_per_step"]
    placement = Placement(**run.get("placement", {}))
    compared = comparable_settings(lineage, result)
    compared |= {f"placement: {key}": getattr(placement, key) for key in PLACEMENT}
    metrics = {**training.metrics, **read_benchmarks(job.inputs).get(f"{stage}/{name}", {})}
    return training._replace(metrics=metrics, run=run, compared=compared)


def group_by_settings(runs: Sequence[Training], by_differences: bool = False) -> list[Group]:
    """Group the runs that have the same settings, in the order of the first run of each group.

    Logs, and versions, which may differ in their code or data, are groups of their own. The name of
    a group is the name of its first recipe. If names stay distinct, it has no seed of a sweep.

    by_differences: Name groups by the settings that differ, if that is distinct:
        "learning_rate 0.001".
    """
    found: dict[str, list[Training]] = {}
    for run in runs:
        compared = json.dumps(run.compared, sort_keys=True)
        is_apart = "@" in run.name or not run.compared
        found.setdefault(run.name if is_apart else compared, []).append(run)
    groups = [Group(of[0].name, of) for of in found.values()]
    seedless = [
        of.name.replace(f"-seed-{of.seeds[0]}", "") if len(of.runs) > 1 else of.name
        for of in groups
    ]
    columns = [group.runs[0].compared for group in groups]
    differences = setting_differences(columns) if by_differences else {}
    settings = [
        ", ".join(f"{key.rpartition(': ')[2]} {as_text(of[n])}" for key, of in differences.items())
        for n in range(len(groups))
    ]
    # Groups of seeds alone differ in no setting.
    for names in (settings, seedless):
        if all(names) and len(set(names)) == len(groups):
            return [of._replace(name=name) for of, name in zip(groups, names, strict=True)]
    return groups


def long_rows(groups: Sequence[Group], metrics: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield rows of COLUMNS: of each metric and group the mean, then the value of each seed.

    A mean has no seed. n is 1 for the value of a seed, which has the interval of its evaluation.
    """
    for metric, group in product(metrics, groups):
        for part in (group, *(group._replace(runs=[run]) for run in group.runs)):
            if result := part.result(metric):
                seed = None if part is group else part.seeds[0]
                interval = result.interval or (None, None)
                yield group.name, seed, metric, result.value, *interval, result.n


def result_tables(groups: Sequence[Group], metrics: Sequence[str]) -> list[Table]:
    """Return the tables of differences and of all numbers, without those that have no rows."""
    first, *others = groups
    differences = {group.name: partial(group.difference, first) for group in others}
    caption = translate("differences_from", name=first.name)
    tables = [
        metric_table(caption, differences, metrics, differences=True),
        metric_table(translate("results"), {of.name: of.result for of in groups}, metrics),
    ]
    return [table for table in tables if table.rows]


def setting_table(groups: Sequence[Group]) -> Table:
    """Return the table of the settings that differ, the seeds, and the costs of a training."""
    differences = setting_differences([group.runs[0].compared for group in groups])
    rows = [[setting, *map(as_text, values)] for setting, values in differences.items()]
    seeds = [", ".join(str(seed) for seed in of.seeds if seed is not None) for of in groups]
    rows.append([translate("seed"), *seeds])
    for key in COSTS:
        costs = [[run.run[key] for run in of.runs if key in run.run] for of in groups]
        if any(costs):
            means = [run_value(key, statistics.fmean(of) if of else None) for of in costs]
            rows.append([name_of("run", key), *means])
    return Table("", ["", *(group.name for group in groups)], rows, translate("settings_note"))


def comparable_settings(lineage: Lineage, result: str) -> dict[str, Any]:
    """Return the settings of a training without the seed, and the settings of the jobs before it.

    A setting of an earlier job has the rule of the job as a prefix, or "dataset" or "model".
    Several jobs of a rule have a list of their values. lineage, result: By RULE/KEY.
    """
    found: dict[str, list[Any]] = {}
    places = [result]
    for place in places:
        job = lineage[place]
        places += [each for each in job["inputs"].values() if each not in places]
        prefix = "" if place == result else f"{SOURCES.get(job['rule'], job['rule'])}: "
        if prefix and job["rule"].startswith(DERIVED):
            continue
        number, digest = job["files"]["number"], job["files"]["digest"]
        for key, value in (job["settings"] | ({"files": digest[:12]} if number else {})).items():
            if key != "distributions" and (prefix or key != "seed"):
                values = found.setdefault(f"{prefix}{key}", [])
                values += [value] if value not in values else []
    return {key: values[0] if len(values) == 1 else values for key, values in found.items()}


def setting_differences(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of the settings that differ, "" where a column does not have a setting.

    A setting of a job that only some columns have is not listed: the setting that names the job
    differs. Nor is one that an earlier row has with the same values. Logs have no settings.
    """
    compared = [column for column in columns if column]
    jobs = [{key.rpartition(": ")[0] for key in column} for column in compared]
    found: dict[tuple[str, ...], tuple[str, list[Any]]] = {}
    for key in dict.fromkeys(key for column in columns for key in column):
        job, _, setting = key.rpartition(": ")
        values = [column.get(key, "") for column in columns]
        texts = tuple(as_text(column.get(key, "")) for column in compared)
        if all(job in of_column for of_column in jobs) and len(set(texts)) > 1:
            found.setdefault((setting, *texts), (key, values))
    return dict(found.values())
