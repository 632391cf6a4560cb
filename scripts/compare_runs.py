"""Compare recipes of a stage on one page: settings that differ, results and curves.

A recipe is NAME, or NAME@KEY for a version in the cache.

Recipes that differ only in their seed are one column: mean and interval over the seeds.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snakechat.evaluation.comparisons import initial_model
from snakechat.reporting.formatting import format_with_interval
from snakechat.reporting.intervals import mean_interval
from snakechat.reporting.labels import CURVES, FRACTIONS, PAIRS, PERPLEXITIES, RESPONSES, WIN_RATES
from snakechat.reporting.pages import take_svg, write_page
from snakechat.reporting.plots import Point, draw_curves, points_of
from snakechat.reporting.translations import Translate, translator
from snakechat.workflow.cache_versions import is_version, read_version_file
from snakechat.workflow.job import Job, run
from snakechat.workflow.lineage import ancestors, merge_lineages

# Results of each stage: labels by path in metrics.json.
_PAIR_KEYS = ("accuracy", "ties", "loss", "calibration_error")
_RESPONSE_KEYS = ("score", "judge_score", "success", "greedy_success")
_STYLE_KEYS = ("kl_to_sft", "kl_to_dpo", "kl_to_base", "length", "ended_by_eos")
_PAIR_RESULTS = {key: PAIRS[key] for key in _PAIR_KEYS}
RESULTS = {
    "sft": {f"after.{key}": label for key, label in PERPLEXITIES.items()},
    "reward": _PAIR_RESULTS,
    "dpo": _PAIR_RESULTS,
    "rlhf": {
        **{f"rlhf.{key}": RESPONSES[key] for key in _RESPONSE_KEYS},
        **{
            f"wins.rlhf.{initial}.{key}": label
            for initial, labels in WIN_RATES.items()
            for key, label in labels.items()
        },
        **{f"rlhf.{key}": RESPONSES[key] for key in _STYLE_KEYS},
    },
}

Row = list[str]
Estimate = tuple[float, Sequence[float] | None]


def main(job: Job[Any]) -> None:
    """Write the page."""
    translate = translator(job.settings.language)
    stage, _, name = job.spec["name"].partition("/")
    groups = group_by_settings([Run(job, recipe) for recipe in job.settings.recipes])
    plot = job.result / "curves.svg"
    panels = {
        translate(label): {group.label(translate): group.points(key) for group in groups}
        for key, label in CURVES[stage].items()
    }
    draw_curves(plot, panels, translate("step"), text_as_text=True)
    write_page(
        job.result / "comparison.html",
        "comparison.html",
        _=translate,
        language=job.settings.language,
        title=f"{stage}: {name}",
        head=["", *(group.label(translate) for group in groups)],
        differences=setting_differences(groups, translate),
        results=result_rows(groups, RESULTS[stage], translate),
        plot=take_svg(plot),
    )


class Run:
    """A training and its evaluation.

    Attributes:
        name: Name of the recipe.
        seed: Seed of the training.
        settings: Settings of the training and of the jobs before it, without the seed.
        steps: The lines of metrics.jsonl.
        metrics: metrics.json of the evaluation.
    """

    def __init__(self, job: Job[Any], name: str) -> None:
        if is_version(name):
            folders = job.placement["versions"][name]
            manifest = json.loads(Path(folders["training"], "manifest.json").read_text())
            path, lineage = manifest["spec"]["path"], merge_lineages([manifest])
            steps = read_version_file(folders["training"], "metrics.jsonl")
            metrics = read_version_file(folders["evaluation"], "metrics.json")
        else:
            path, lineage = str(job.inputs[f"training.{name}"]), job.lineage
            steps = Path(path, "metrics.jsonl").read_text()
            metrics = (job.inputs[f"evaluation.{name}"] / "metrics.json").read_text()
        settings = dict(lineage[path]["settings"])
        self.name = name
        self.seed = settings.pop("seed")
        self.settings = settings | upstream_settings(lineage, path)
        self.steps = [json.loads(line) for line in steps.splitlines()]
        self.metrics = json.loads(metrics)

    def result(self, path: str) -> Estimate | None:
        """Return a metric (path: keys joined by dots) and its interval, if it has one; or None.

        Of the win rates, those against the model that RLHF started from are results.
        """
        value, keys = self.metrics, path.split(".")
        for key in keys:
            if key not in value:
                return None
            value = value[key]
        if keys[0] == "wins" and keys[2] != initial_model(self.metrics):
            return None
        if isinstance(value, dict):
            return value["mean"], value["interval_95"]
        model, name = keys[0], keys[-1]
        return value, self.metrics.get("intervals_95", {}).get(model, {}).get(name)


def upstream_settings(lineage: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the settings of the jobs before a training, with the name of the job in the key."""
    jobs = [lineage[upstream] for upstream in sorted(ancestors(lineage, path))]
    rules = [job["rule"] for job in jobs]
    settings: dict[str, Any] = {}
    for job in jobs:
        # The settings of tokenization are settings of the training too.
        if job["rule"].startswith("tokenize"):
            continue
        prefix = job["rule"]
        if rules.count(prefix) > 1:
            prefix += f" {job['name']}"
        settings |= {f"{prefix}: {key}": value for key, value in job["settings"].items()}
        if job["files"]["number"]:
            settings[f"{prefix}: files"] = job["files"]["digest"][:12]
    return settings


class Group:
    """Runs that differ only in their seed."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs, self.settings = runs, runs[0].settings

    def label(self, translate: Translate) -> str:
        """Return the name of the recipe; for several seeds, their number instead of the seed."""
        first = self.runs[0]
        if len(self.runs) == 1:
            return first.name
        name = first.name.replace(f"-seed-{first.seed}", "")
        return translate("{name} ({count} seeds)", name=name, count=len(self.runs))

    def points(self, key: str) -> list[Point]:
        """Return (step, mean, minimum, maximum) of a metric at the steps that all runs have."""
        curves = [dict(points_of(run.steps, key)) for run in self.runs]
        steps = sorted(set(curves[0]).intersection(*curves[1:]))
        values = [[curve[step] for curve in curves] for step in steps]
        return [
            (step, statistics.fmean(at_step), min(at_step), max(at_step))
            for step, at_step in zip(steps, values, strict=True)
        ]

    def result(self, path: str) -> Estimate | None:
        """Return a metric with its interval, over seeds if there are several, or None."""
        results = [result for run in self.runs if (result := run.result(path)) is not None]
        if len(results) < len(self.runs):
            return None
        if len(results) == 1:
            return results[0]
        values = [value for value, _ in results]
        low, high = mean_interval(values)
        if path.startswith("wins.") or path.rpartition(".")[2] in FRACTIONS:
            # Student's interval does not know that a fraction lies between 0 and 1.
            low, high = max(low, 0.0), min(high, 1.0)
        return statistics.fmean(values), [low, high]


def group_by_settings(runs: list[Run]) -> list[Group]:
    """Group the runs that have the same settings, in the order of the first run of each group.

    Versions, which may differ in their code or data, are groups of their own.
    """
    groups: dict[str, list[Run]] = {}
    for one in runs:
        settings = json.dumps(one.settings, sort_keys=True)
        groups.setdefault(one.name if is_version(one.name) else settings, []).append(one)
    return [Group(members) for members in groups.values()]


def setting_differences(groups: list[Group], translate: Translate) -> list[Row]:
    """Return rows of the settings that differ between groups, and of the seeds."""
    keys = dict.fromkeys(key for group in groups for key in group.settings)
    rows = []
    for key in keys:
        values = [
            json.dumps(group.settings[key], sort_keys=True) if key in group.settings else ""
            for group in groups
        ]
        if len(set(values)) > 1:
            rows.append([key, *values])
    seeds = [", ".join(str(run.seed) for run in group.runs) for group in groups]
    return [*rows, [translate("seed"), *seeds]]


def result_rows(groups: list[Group], labels: dict[str, str], translate: Translate) -> list[Row]:
    """Return rows of the results that any group has. labels: by path in metrics.json."""
    rows = []
    for path, label in labels.items():
        results = [group.result(path) for group in groups]
        if any(results):
            cells = ["" if each is None else format_with_interval(*each) for each in results]
            rows.append([translate(label), *cells])
    return rows


if __name__ == "__main__":
    run(main)
