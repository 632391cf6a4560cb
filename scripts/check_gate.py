"""Check the gate of a recipe: whether a figure of its evaluation is within the bounds.

Writes the figure and its bounds to gate.json. If the figure misses a bound, the job fails and
writes no result.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from snakechat.pages.metrics import read_benchmarks, read_figure
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job, run

# The ends of a path that name a bound of the figure's 95 % interval.
BOUNDS = ("lower_bound", "upper_bound")
BOUND_WORDS = {"min": "at least", "max": "at most"}


def main(job: Job[Any]) -> None:
    """Write gate.json, or fail."""
    gate = job.settings.gate
    recipe, metric = job.spec["name"], gate["metric"]
    metrics = json.loads((job.inputs["evaluation"] / "metrics.json").read_text())
    metrics |= read_benchmarks(job.inputs).get(recipe, {})
    value = figure_value(metrics, metric, f"{recipe}: gate")
    bounds = {key: gate[key] for key in BOUND_WORDS if key in gate}
    # NaN is within no bounds.
    if not bounds.get("min", -math.inf) <= value <= bounds.get("max", math.inf):
        expected = " and ".join(f"{BOUND_WORDS[key]} {bound:g}" for key, bound in bounds.items())
        raise InputError(
            f"{recipe}: {metric} is {value:.4g}, and its gate needs {expected}: improve the recipe,"
            " or change its gate (the model and its evaluation are kept)"
        )
    result = {"metric": metric, "value": value, **bounds}
    (job.result / "gate.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"{recipe} passes its gate: {metric} is {value:.4g}")


def figure_value(metrics: Mapping[str, Any], path: str, place: str) -> float:
    """Return the metric, or the bound of its interval, that a path names; or raise InputError."""
    metric, _, bound = path.rpartition(".")
    figure = read_figure(metrics, metric if bound in BOUNDS else path)
    if figure is None:
        raise InputError(f"{place}: metrics.json of the evaluation has no metric {path}")
    if bound not in BOUNDS:
        return figure.value
    if figure.interval is None:
        raise InputError(f"{place}: {metric} has no 95 % interval: name {metric} instead of {path}")
    return figure.interval[BOUNDS.index(bound)]


if __name__ == "__main__":
    run(main)
