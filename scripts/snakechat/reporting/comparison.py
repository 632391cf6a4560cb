"""Comparisons of recipes: groups of seeds, their names, results and differences."""

import json
import statistics
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from snakechat.evaluation.comparisons import initial_model
from snakechat.reporting.curve_points import Point, points_of
from snakechat.reporting.figures import read_figure
from snakechat.reporting.intervals import difference_interval, mean_interval
from snakechat.reporting.labels import bounds_of
from snakechat.reporting.setting_differences import Roles
from snakechat.reporting.translations import Translate
from snakechat.workflow.stored_versions import is_version

# Columns of comparison.csv.
COLUMNS = ("group", "seed", "metric", "value", "low", "high", "n")


class Estimate(NamedTuple):
    """A metric, its 95 % interval if it has one, and the number of seeds."""

    value: float
    interval: Sequence[float] | None
    n: int


class Run(NamedTuple):
    """A training and its evaluation.

    Attributes:
        name: Name of the recipe.
        seed: Seed of the training.
        settings: Settings of the training, without the seed.
        upstream: The jobs before the training.
        swept: Settings that a sweep gave to the recipe; empty for other recipes.
        steps: The lines of metrics.jsonl.
        metrics: metrics.json of the evaluation.
        seconds: Time of the training, None if it is unknown.
    """

    name: str
    seed: int
    settings: dict[str, Any]
    upstream: Roles
    swept: dict[str, Any]
    steps: list[dict[str, Any]]
    metrics: dict[str, Any]
    seconds: float | None = None

    def result(self, path: str) -> Estimate | None:
        """Return a metric (path: keys joined by dots) and its interval, if it has one; or None.

        Of the win rates, those against the model that RLHF started from are results.
        """
        figure, keys = read_figure(self.metrics, path), path.split(".")
        if figure is None or (keys[0] == "wins" and keys[2] != initial_model(self.metrics)):
            return None
        return Estimate(*figure, 1)


class Group(NamedTuple):
    """Runs that differ only in their seed."""

    runs: list[Run]

    def points(self, key: str) -> list[Point]:
        """Return (step, mean, minimum, maximum) of a metric at the steps that all runs have."""
        curves = [dict(points_of(run.steps, key)) for run in self.runs]
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

    def result(self, path: str) -> Estimate | None:
        """Return a metric with its interval, over seeds if there are several, or None."""
        values = self.values(path)
        if len(values) < 2:
            return self.runs[0].result(path) if values else None
        return Estimate(
            statistics.fmean(values), mean_interval(values, *bounds_of(path)), len(values)
        )

    def difference(self, other: "Group", path: str) -> Estimate | None:
        """Return the difference of a metric from another group, if both have several seeds.

        Its interval is clipped to the differences that bounds of the metric allow, and so never
        loses one that is possible. n: seeds of the smaller group.
        """
        values, others = self.values(path), other.values(path)
        n = min(len(values), len(others))
        if n < 2:
            return None
        interval = difference_interval(values, others)
        lower, upper = bounds_of(path)
        if interval and lower is not None and upper is not None:
            width = upper - lower
            interval = [max(interval[0], -width), min(interval[1], width)]
        return Estimate(statistics.fmean(values) - statistics.fmean(others), interval, n)


def group_by_settings(runs: Sequence[Run]) -> list[Group]:
    """Group the runs that have the same settings, in the order of the first run of each group.

    Versions, which may differ in their code or data, are groups of their own.
    """
    groups: dict[str, Group] = {}
    for one in runs:
        upstream = {
            role: sorted(json.dumps(job.settings, sort_keys=True) for job in jobs)
            for role, jobs in one.upstream.items()
        }
        settings = json.dumps([one.settings, upstream], sort_keys=True)
        key = one.name if is_version(one.name) else settings
        groups.setdefault(key, Group([])).runs.append(one)
    return list(groups.values())


def group_names(groups: Sequence[Group], translate: Translate = str.format) -> list[str]:
    """Return the name of each group: the swept settings that differ, or the name of its recipe.

    Names by settings or without a seed may be those of several groups. Then each group has the name
    of its first run.
    """
    by_values = [values_name(group, groups, translate) or recipe_name(group) for group in groups]
    for names in (by_values, list(map(recipe_name, groups))):
        if len(set(names)) == len(names):
            return names
    return [group.runs[0].name for group in groups]


def values_name(group: Group, groups: Sequence[Group], translate: Translate) -> str:
    """Return the swept settings of a group that differ between groups: `kl_coef 0.05`.

    Empty if the user wrote a recipe of the group, or if no such setting differs.
    """

    def values(key: str, members: Group) -> set[str]:
        return {json.dumps(run.swept.get(key)) for run in members.runs}

    first = group.runs[0]
    if not all(run.swept for run in group.runs):
        return ""
    differing = [
        key
        for key in first.swept
        if key != "seed"
        and len(values(key, group)) == 1
        and any(values(key, other) != values(key, group) for other in groups)
    ]
    return ", ".join(f"{key} {first.swept[key]}" for key in differing)


def recipe_name(group: Group) -> str:
    """Return the name of the recipe of a group, of several seeds without the seed."""
    written = [run for run in group.runs if not run.swept]
    first = (written or group.runs)[0]
    if len(group.runs) == 1 or written:
        return first.name
    return first.name.replace(f"-seed-{first.seed}", "")


def long_rows(groups: Sequence[Group], metrics: Collection[str]) -> list[dict[str, Any]]:
    """Return rows of COLUMNS: of each group and metric the mean, then the value of each seed.

    A mean has no seed. n is 1 for the value of a seed, whose interval is that of its evaluation.
    """
    rows = []
    for name, group in zip(group_names(groups), groups, strict=True):
        for metric in metrics:
            results: list[tuple[int | None, Estimate | None]] = [(None, group.result(metric))]
            results += [(run.seed, run.result(metric)) for run in group.runs]
            for seed, result in results:
                if result is not None:
                    low, high = result.interval or (None, None)
                    row = (name, seed, metric, result.value, low, high, result.n)
                    rows.append(dict(zip(COLUMNS, row, strict=True)))
    return rows


def difference_rows(groups: Sequence[Group], metrics: Collection[str]) -> list[dict[str, Any]]:
    """Return the differences of the other groups from the first one, by group and metric."""
    first, *others = groups
    _, *names = group_names(groups)
    rows = []
    for name, group in zip(names, others, strict=True):
        for metric in metrics:
            if difference := group.difference(first, metric):
                low, high = difference.interval or (None, None)
                rows.append(
                    {
                        "group": name,
                        "metric": metric,
                        "value": difference.value,
                        "low": low,
                        "high": high,
                        "n": difference.n,
                        "excludes_zero": excludes_zero(difference),
                    }
                )
    return rows


def excludes_zero(difference: Estimate) -> bool:
    """Return whether the interval of a difference does not contain zero."""
    if difference.interval is None:
        return False
    low, high = difference.interval
    return low > 0 or high < 0
