"""Comparisons of recipes: groups of seeds, their names, results and differences."""

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from snakechat.evaluation.comparisons import INITIAL_MODELS, initial_model
from snakechat.evaluation.intervals import difference_interval, mean_interval
from snakechat.reporting.curves import points_of
from snakechat.reporting.labels import is_fraction
from snakechat.reporting.metric_values import Figure, read_figure
from snakechat.workflow.stored_versions import is_version

# Columns of comparison.csv.
COLUMNS = ("group", "seed", "metric", "value", "low", "high", "n")


class Run(NamedTuple):
    """A training and its evaluation.

    Attributes:
        name: Name of the recipe.
        seed: Seed of the training.
        settings: Settings of the training, without the seed, and of the jobs before it; keys of its
            placement.
        steps: The lines of metrics.jsonl.
        metrics: metrics.json of the evaluation.
        record: run.json of the training, None if it is unknown.
    """

    name: str
    seed: int
    settings: dict[str, Any]
    steps: list[dict[str, Any]]
    metrics: dict[str, Any]
    record: dict[str, Any] | None = None

    def result(self, path: str) -> Figure | None:
        """Return a metric (path: keys joined by dots), or None.

        Of the models behind RLHF, the one that it started from counts, and so do the win rates
        against it.
        """
        keys = path.split(".")
        compared = keys[2] if keys[0] == "wins" else keys[0]
        if compared in INITIAL_MODELS and compared != initial_model(self.metrics):
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
        if len(values) < 2:
            return self.runs[0].result(path) if values else None
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
        difference = statistics.fmean(values) - statistics.fmean(others)
        return Figure(difference, difference_interval(values, others), n)


def group_by_settings(runs: Sequence[Run]) -> list[Group]:
    """Group the runs that have the same settings, in the order of the first run of each group.

    Versions, which may differ in their code or data, are groups of their own. The name of a group
    is the name of its first recipe, without the seed of a sweep if the names stay distinct.
    """
    found: dict[str, list[Run]] = {}
    for one in runs:
        settings = json.dumps(one.settings, sort_keys=True)
        found.setdefault(one.name if is_version(one.name) else settings, []).append(one)
    groups = [Group(of_group[0].name, of_group) for of_group in found.values()]
    names = [
        group.name.replace(f"-seed-{group.runs[0].seed}", "") if len(group.runs) > 1 else group.name
        for group in groups
    ]
    if len(set(names)) < len(names):
        return groups
    return [group._replace(name=name) for group, name in zip(groups, names, strict=True)]


def long_rows(groups: Sequence[Group], metrics: Iterable[str]) -> Iterator[tuple[Any, ...]]:
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
