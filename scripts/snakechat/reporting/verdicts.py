"""Verdicts: whether the evaluation of a recipe meets what the recipe expects.

Of the difference from a baseline, the 95 % interval follows from those of both figures: the square
root of the sum of squares of their distances from the figures (Zou and Donner 2008, "Construction
of confidence limits about effect measures", equation 3; for proportions, Newcombe 1998, method 10).
This takes the evaluations for independent. Those of the same prompts usually vary together, so that
the interval is rather too wide, and a difference that it calls worse is worse.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from snakechat.config.expectations import BASELINE, PAIR_FRACTIONS
from snakechat.reporting.figures import Figure, read_figure
from snakechat.reporting.intervals import proportion_interval
from snakechat.reporting.labels import better_sign
from snakechat.workflow.digests import digest

Metrics = Mapping[str, Any]

# The metrics that a model must not be worse in, by stage; better_sign says which is better.
COMPARED = {
    "reward": ("accuracy",),
    "dpo": ("accuracy",),
    "rlhf": (
        *("rlhf.score", "rlhf.judge_score", "rlhf.success", "rlhf.greedy_success"),
        *("rlhf.ended_by_eos", "rlhf.repetition"),
        *(
            f"wins.rlhf.{initial}.{key}"
            for initial in ("dpo", "sft", "base")
            for key in ("score", "judge_score", "llm_judge")
        ),
    ),
}


class Verdict(NamedTuple):
    """Whether a metric is as expected.

    Attributes:
        metric: Path in metrics.json.
        figure: Its value and interval; None if the evaluation does not have it.
        kind: What is expected: at least or at most a bound, or not worse than a baseline.
        bound: The bound, or the baseline's value.
        by: What is compared with the bound: the value, or a bound of its interval.
        difference: The difference from the baseline and its interval.
        baseline: The recipe or file that it must not be worse than.
        met: Whether it is so.
    """

    metric: str
    figure: Figure | None
    kind: Literal["min", "max", "not_worse_than"]
    bound: float
    met: bool
    by: str = "value"
    difference: Figure | None = None
    baseline: str = ""


def judge(
    stage: str, expected: Mapping[str, Any], evaluation: Path, baseline: Path | None
) -> list[Verdict]:
    """Return the verdicts on an evaluation.

    Args:
        stage: Stage of the recipe.
        expected: What the recipe expects (snakechat.config.expectations.expectations).
        evaluation: The result of its evaluation.
        baseline: That of the recipe which it must not be worse than, if it is a recipe.
    """
    metrics = read_metrics(evaluation)
    verdicts = list(_judge_bounds(expected.get("expect", {}), metrics))
    if "not_worse_than" in expected:
        than = expected["baseline"] if baseline is None else figures_of(stage, baseline)
        now = figures_of(stage, evaluation)
        verdicts += _judge_differences(now, than, expected["not_worse_than"])
    return verdicts


def read_metrics(evaluation: Path) -> dict[str, Any]:
    """Return metrics.json of an evaluation."""
    metrics: dict[str, Any] = json.loads((evaluation / "metrics.json").read_text())
    return metrics


def figure_of(metrics: Metrics, path: str) -> Figure | None:
    """Return a metric with its interval: of fractions of pairs, Wilson's."""
    figure = read_figure(metrics, path)
    prefix, _, metric = path.rpartition(".")
    if figure is None or metric not in PAIR_FRACTIONS:
        return figure
    pairs = read_figure(metrics, f"{prefix}.pairs" if prefix else "pairs")
    return pairs and Figure(figure.value, proportion_interval(figure.value, int(pairs.value)))


def figures_of(stage: str, evaluation: Path) -> dict[str, Any]:
    """Return the figures of an evaluation that others are compared with, as in baseline files."""
    metrics = read_metrics(evaluation)
    manifest = json.loads((evaluation / "manifest.json").read_text())
    figures = {path: figure_of(metrics, path) for path in COMPARED[stage]}
    return {
        BASELINE: 1,
        "stage": stage,
        "recipe": manifest["spec"]["name"],
        "figures": {path: list(figure) for path, figure in figures.items() if figure},
        "measures": _measures(manifest) if stage == "rlhf" else {},
    }


def _measures(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of what the scores of an evaluation come from, by name of the score."""
    settings, inputs = manifest["spec"]["settings"], manifest["inputs"]
    keys = {
        "score": ("reward", "reward_functions", "llm_judges"),
        "judge_score": ("judge", "llm_judges"),
    }
    return {
        score: digest(
            [
                {name: inputs[name] for name in inputs if name.partition(".")[0] == names[0]},
                [settings.get(name) for name in names],
            ]
        )
        for score, names in keys.items()
    }


def _judge_bounds(expect: Mapping[str, Mapping[str, Any]], metrics: Metrics) -> Iterator[Verdict]:
    """Yield the verdicts on the bounds of metrics."""
    for path, bounds in expect.items():
        figure, by = figure_of(metrics, path), bounds.get("by", "value")
        for kind in ("min", "max"):
            if kind in bounds:
                compared = math.nan if figure is None else _compared(figure, by)
                bound = bounds[kind]
                # Comparisons with NaN are false.
                met = compared >= bound if kind == "min" else compared <= bound
                yield Verdict(path, figure, kind, bound, met, by)


def _compared(figure: Figure, by: str) -> float:
    """Return what is compared with a bound: the value, or an end of its interval."""
    if by == "value":
        return figure.value
    if figure.interval is None:
        return math.nan
    return figure.interval[by == "upper_bound"]


def _judge_differences(now: Metrics, than: Metrics, name: str) -> Iterator[Verdict]:
    """Yield the verdicts on the metrics that both have, by the same measure."""
    for path, old in than["figures"].items():
        measure = path.rpartition(".")[2]
        is_comparable = now["measures"].get(measure) == than["measures"].get(measure)
        if path in now["figures"] and is_comparable:
            figure, other = Figure(*now["figures"][path]), Figure(*old)
            difference = difference_of(figure, other)
            low, high = difference.interval or (math.nan, math.nan)
            met = high >= 0 if better_sign(path) > 0 else low <= 0
            yield Verdict(
                path,
                figure,
                "not_worse_than",
                other.value,
                met,
                difference=difference,
                baseline=name,
            )


def difference_of(figure: Figure, other: Figure) -> Figure:
    """Return the difference of two figures with intervals, with its 95 % interval."""
    assert figure.interval is not None and other.interval is not None
    (low, high), (other_low, other_high) = figure.interval, other.interval
    difference = figure.value - other.value
    below = math.hypot(figure.value - low, other_high - other.value)
    above = math.hypot(high - figure.value, other.value - other_low)
    return Figure(difference, [difference - below, difference + above])


def describe(verdict: Verdict) -> str:
    """Describe a verdict: what was found, and what was expected. In English, for messages."""
    if verdict.figure is None:
        return f"the evaluation has no {verdict.metric}"
    if verdict.difference is not None:
        low, high = verdict.difference.interval or (math.nan, math.nan)
        return (
            f"{verdict.metric} is {verdict.figure.value:.4g}, expected not worse than"
            f" {verdict.bound:.4g} of {verdict.baseline} (difference"
            f" {verdict.difference.value:+.4g}, 95 % interval {low:+.4g} to {high:+.4g})"
        )
    found = f"{verdict.metric} is {verdict.figure.value:.4g}"
    if verdict.by != "value":
        bound = _compared(verdict.figure, verdict.by)
        found = f"the {verdict.by.replace('_', ' ')} of {verdict.metric} is {bound:.4g}"
    return f"{found}, expected at {'least' if verdict.kind == 'min' else 'most'} {verdict.bound:g}"
