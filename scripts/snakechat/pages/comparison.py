"""The page that compares recipes of a stage: results, curves, and the settings that differ.

Recipes that differ only in their seed are one column: mean and interval over the seeds. Those with
another ZeRO stage are columns of their own. comparison.csv has the same numbers.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.evaluation.comparisons import INITIAL_MODELS, initial_model
from snakechat.evaluation.intervals import difference_interval, mean_interval
from snakechat.pages.deepspeed_chat import read_log
from snakechat.pages.metrics import (
    RESULTS,
    Figure,
    benchmark_paths,
    is_fraction,
    own_metrics,
    read_benchmarks,
    read_figure,
    read_json,
    with_metrics_before,
)
from snakechat.pages.page import Page, Section, Table, write_csv
from snakechat.pages.plots import curve_panels, metric_panels, points_of
from snakechat.pages.tables import metric_table
from snakechat.pages.texts import as_text, name_of, run_value, translate
from snakechat.workflow.job import Job
from snakechat.workflow.links import is_version, read_version_file
from snakechat.workflow.manifest import (
    MANIFEST,
    Lineage,
    merge_lineages,
    read_run_record,
    result_id,
)
from snakechat.workflow.placement import Placement

# Columns of comparison.csv.
COLUMNS = ("group", "seed", "metric", "value", "low", "high", "n")
# Keys of a placement that are compared like settings: trainings at each ZeRO stage, say.
PLACEMENT = ("zero_stage", "critic_zero_stage", "offload")
# Costs of a training, by their keys in run.json.
COSTS = ("seconds", "seconds_per_step", "rows_per_second", "peak_memory_mb", "peak_gpu_memory_mb")
# Rules whose settings follow from the settings of a training.
DERIVED = ("tokenize_", "compute_reference")
# Rules of which each makes a dataset or a base model: their settings are those of one job.
SOURCES = dict.fromkeys(("import_dataset", "label_pairs", "select_responses"), "dataset")
SOURCES |= dict.fromkeys(("init_model", "fetch_model"), "model")


class Run(NamedTuple):
    """A training and its evaluation.

    Attributes:
        name: Name of the recipe.
        seed: Seed of the training; None of a command that does not name it.
        settings: Settings of the training, without the seed, and of the jobs before it; keys of its
            placement. Empty for a training log of another program.
        steps: The lines of metrics.jsonl.
        metrics: metrics.json of the evaluation.
        record: run.json of the training; empty if it is unknown.
    """

    name: str
    seed: int | None
    settings: dict[str, Any]
    steps: list[dict[str, Any]]
    metrics: dict[str, Any]
    record: Mapping[str, Any] = {}

    def result(self, path: str) -> Figure | None:
        """Return a metric (path: keys joined by dots), or None.

        Of the models behind RLHF, the one that it started from counts, and so do the win rates
        against it.
        """
        keys = path.split(".")
        compared = keys[2] if keys[0] == "wins" else keys[0]
        if self.metrics and compared in INITIAL_MODELS and compared != initial_model(self.metrics):
            return None
        return read_figure(self.metrics, path)


class Group(NamedTuple):
    """Runs that differ only in their seed."""

    name: str
    runs: list[Run]

    def points(self, key: str) -> list[tuple[float, ...]]:
        """Return (step, value) of a metric; of several runs (step, mean, minimum, maximum).

        Steps are those that all runs have.
        """
        curves = [{step: value for step, value in points_of(run.steps, key)} for run in self.runs]
        if len(curves) == 1:
            return list(curves[0].items())
        steps = sorted(set(curves[0]).intersection(*curves[1:]))
        values = [[curve[step] for curve in curves] for step in steps]
        return [
            (step, statistics.fmean(at_step), min(at_step), max(at_step))
            for step, at_step in zip(steps, values, strict=True)
        ]

    def values(self, path: str) -> list[float]:
        """Return a metric of each run; nothing if a run does not have it."""
        results = [run.result(path) for run in self.runs]
        values = [result.value for result in results if result is not None]
        return values if len(values) == len(results) else []

    def result(self, path: str) -> Figure | None:
        """Return a metric with its interval, over seeds if there are several, or None."""
        values = self.values(path)
        if len(set(values)) < 2:
            # Equal values say nothing about the variance.
            figure = self.runs[0].result(path) if values else None
            return figure and figure._replace(n=len(values))
        interval = mean_interval(values, 0, 1) if is_fraction(path) else mean_interval(values)
        return Figure(statistics.fmean(values), interval, len(values))

    def difference(self, other: "Group", path: str) -> Figure | None:
        """Return the difference of a metric from another group, if both have several seeds.

        n: seeds of the smaller group.
        """
        values, others = self.values(path), other.values(path)
        n = min(len(values), len(others))
        if n < 2:
            return None
        mean, other_mean = statistics.fmean(values), statistics.fmean(others)
        interval = difference_interval(values, others)
        return Figure(mean - other_mean, interval, n, scale=abs(other_mean))


def comparison(job: Job[Any]) -> Page:
    """Return the page of a comparison; write its numbers."""
    stage, name = job.settings.stage, job.settings.name
    runs = [_read_run(job, recipe) for recipe in job.settings.recipes]
    groups = group_by_settings(runs)
    if "-vs-" not in name:
        # Of a sweep.
        groups = named_by_differences(groups)
    found = [path for run in runs for path in benchmark_paths(run.metrics)]
    metrics = [*RESULTS[stage], *dict.fromkeys(found)]
    write_csv(job.result / "comparison.csv", COLUMNS, long_rows(groups, metrics))
    caption = translate(
        "A line shows the mean over seeds, and a band reaches from the lowest to the highest seed."
        " Of a single seed, the thin line shows the values and the thick line means of several."
    )
    lines = {group.name: group.points for group in groups}
    own = [key for run in runs for key in own_metrics(stage, run.settings, run.steps)]
    logs = ", ".join(run.name for run in runs if not run.settings)
    of_logs = translate(
        "{names}: of a training log of DeepSpeed-Chat, whose perplexity is a mean over batches and"
        " whose accuracy counts at most 100 batches.",
        names=logs,
    )
    return Page(
        eyebrow=translate("Comparison of recipes: {stage}", stage=name_of("stages", stage)),
        title=name,
        sections=[
            result_section(groups, metrics),
            Section(translate("Curves"), curve_panels(stage, lines, own), caption),
            setting_section(groups),
        ],
        notes=[
            translate(
                "Intervals are 95 % intervals, and n is the number of seeds. The interval of"
                " several seeds is Student's, the interval of their differences is Welch's, and a"
                " single seed has the interval of its evaluation. A single seed does not"
                " distinguish a better recipe from a lucky one."
            ),
            *([of_logs] if logs else []),
            translate(
                "comparison.csv in {folder} has the same numbers.",
                folder=f"output/pages/compare/{stage}/{name}",
            ),
        ],
    )


def _read_run(job: Job[Any], name: str) -> Run:
    """Read a training and its evaluation from the inputs of a job, or from the store."""
    stage, version = job.settings.stage, job.options.versions.get(name, {})
    if "log" in version:
        return Run(name, None, {}, *read_log(Path(version["log"]), name, stage))
    folder, evaluation = (
        version.get(kind) or job.inputs[f"{kind}.{name}"] for kind in ("training", "evaluation")
    )
    manifest = read_json(Path(folder, MANIFEST))
    lineage, result = merge_lineages([manifest]), result_id(manifest)
    steps = read_version_file(folder, "metrics.jsonl")
    metrics = json.loads(read_version_file(evaluation, "metrics.json"))
    metrics |= read_benchmarks(job.inputs).get(f"{stage}/{name}", {})
    settings = lineage[result]["settings"]
    record = read_run_record(folder, lineage[result]["spec"]) or {}
    placement = Placement(**record.get("placement", {}))
    batch = settings.get("rollout_batch_size", settings.get("global_batch_size"))
    if batch and "seconds_per_step" in record:
        record["rows_per_second"] = batch / record["seconds_per_step"]
    lines = [json.loads(line) for line in steps.splitlines()]
    return Run(
        name=name,
        seed=settings.get("seed"),
        settings=comparable_settings(lineage, result)
        | {f"placement: {key}": getattr(placement, key) for key in PLACEMENT},
        steps=lines,
        metrics=with_metrics_before(metrics, lines),
        record=record,
    )


def group_by_settings(runs: Sequence[Run]) -> list[Group]:
    """Group the runs that have the same settings, in the order of the first run of each group.

    Logs, and versions, which may differ in their code or data, are groups of their own. The name of
    a group is the name of its first recipe, without the seed of a sweep if the names stay distinct.
    """
    found: dict[str, list[Run]] = {}
    for one in runs:
        settings = json.dumps(one.settings, sort_keys=True)
        is_apart = is_version(one.name) or not one.settings
        found.setdefault(one.name if is_apart else settings, []).append(one)
    groups = [Group(of_group[0].name, of_group) for of_group in found.values()]
    names = [
        of.name.replace(f"-seed-{of.runs[0].seed}", "") if len(of.runs) > 1 else of.name
        for of in groups
    ]
    return _renamed(groups, names)


def named_by_differences(groups: list[Group]) -> list[Group]:
    """Return groups whose names are the settings that differ: "learning_rate 0.001"."""
    differences = setting_differences([group.runs[0].settings for group in groups])
    texts = [
        [f"{key.rpartition(': ')[2]} {as_text(value)}" for value in values]
        for key, values in differences.items()
    ]
    return _renamed(groups, [", ".join(of_group) for of_group in zip(*texts, strict=True)])


def _renamed(groups: list[Group], names: Sequence[str]) -> list[Group]:
    """Return groups with other names, if these are distinct."""
    if len(set(names)) < len(groups):
        return groups
    return [group._replace(name=name) for group, name in zip(groups, names, strict=True)]


def long_rows(groups: Sequence[Group], metrics: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield rows of COLUMNS: of each metric and group the mean, then the value of each seed.

    A mean has no seed. n is 1 for the value of a seed, which has the interval of its evaluation.
    """
    for metric in metrics:
        for group in groups:
            results: list[tuple[int | None, Figure | None]] = [(None, group.result(metric))]
            results += [(run.seed, run.result(metric)) for run in group.runs]
            for seed, result in results:
                if result is not None:
                    low, high = result.interval or (None, None)
                    yield group.name, seed, metric, result.value, low, high, result.n


def result_section(groups: Sequence[Group], metrics: Sequence[str]) -> Section:
    """Return the section of results: a figure of each metric, differences, and all numbers."""
    columns = {group.name: group.result for group in groups}
    first, *others = groups
    differences: dict[str, Callable[[str], Figure | None]] = {
        group.name: partial(group.difference, first) for group in others
    }
    caption = translate("Differences from {name}", name=first.name)
    tables = [
        metric_table(caption, differences, metrics, differences=True),
        metric_table(translate("Results"), columns, metrics),
    ]
    of_trained = [m for m in metrics if m.partition(".")[0] not in ("before", *INITIAL_MODELS)]
    return Section(
        translate("Results"),
        panels=metric_panels(columns, of_trained),
        caption=translate("Bars are 95 % intervals; points without a bar have none."),
        tables=[table for table in tables if table.rows],
    )


def setting_section(groups: Sequence[Group]) -> Section:
    """Return the section of the settings that differ, the seeds, and the costs of a training."""
    differences = setting_differences([group.runs[0].settings for group in groups])
    rows = [[setting, *map(as_text, values)] for setting, values in differences.items()]
    seeds = [", ".join(str(run.seed) for run in of.runs if run.seed is not None) for of in groups]
    rows.append([translate("seed"), *seeds])
    for key in COSTS:
        costs = [[run.record[key] for run in of.runs if key in run.record] for of in groups]
        if any(costs):
            means = [run_value(key, statistics.fmean(of) if of else None) for of in costs]
            rows.append([name_of("run", key), *means])
    note = translate(
        "A setting of an earlier job has the rule of the job as a prefix, or dataset or model."
        " Times and memory are means over seeds."
    )
    table = Table("", ["", *(group.name for group in groups)], rows, note)
    return Section(translate("Settings that differ"), tables=[table])


def comparable_settings(lineage: Lineage, result: str) -> dict[str, Any]:
    """Return the settings of a training without the seed, and the settings of the jobs before it.

    A setting of an earlier job has the rule of the job as a prefix, or "dataset" or "model".
    Several jobs of a rule have a list of their values.

    Args:
        lineage: The training and all jobs before it, by RULE/KEY.
        result: RULE/KEY of the training.
    """
    settings = {key: value for key, value in _job_settings(lineage[result]) if key != "seed"}
    upstream: dict[str, list[Any]] = {}
    before = list(lineage[result]["inputs"].values())
    for place in before:
        job = lineage[place]
        before += [each for each in job["inputs"].values() if each not in before]
        for key, value in () if job["rule"].startswith(DERIVED) else _job_settings(job):
            prefix = SOURCES.get(job["rule"], job["rule"])
            values = upstream.setdefault(f"{prefix}: {key}", [])
            if value not in values:
                values.append(value)
    several = {key: values[0] if len(values) == 1 else values for key, values in upstream.items()}
    return settings | several


def _job_settings(job: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the settings of a job of a lineage, and the digest of its external files."""
    files = [("files", job["files"]["digest"][:12])] if job["files"]["number"] else []
    settings = [each for each in job["settings"].items() if each[0] != "distributions"]
    return [*settings, *files]


def setting_differences(columns: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
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
