"""Figures of an evaluation: the numbers of metrics.json by their path, with their intervals."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """A number, its 95 % interval if it has one, and of how many seeds it is the mean."""

    value: float
    interval: Sequence[float] | None = None
    n: int = 1

    @property
    def direction(self) -> int:
        """1 if the interval is above 0, -1 if it is below 0, or else 0."""
        low, high = self.interval or (0, 0)
        return (low > 0) - (high < 0)


def read_figure(metrics: Mapping[str, Any], path: str) -> Figure | None:
    """Return a number of metrics.json; None if there is none.

    path: Keys joined by dots. A key, such as the name of a dataset, may contain dots itself.
    """
    value = _find(metrics, path)
    if isinstance(value, Mapping):
        return Figure(value["mean"], value["interval_95"]) if "interval_95" in value else None
    if not isinstance(value, int | float):
        return None
    # The intervals of a dataset are beside its metrics.
    prefix, dot, key = path.rpartition(".")
    interval = _find(metrics, f"{prefix}{dot}intervals_95.{key}")
    return Figure(value, interval or _find(metrics.get("intervals_95", {}), path))


def with_metrics_before(
    metrics: dict[str, Any], steps: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return metrics.json with the evaluation before a reward model or DPO, if it had one.

    steps: The lines of metrics.jsonl.
    """
    if not {"accuracy", "auc"} & metrics.keys() or not steps or steps[0]["step"] > 0:
        return metrics
    before = {
        key.removeprefix("eval_"): value
        for key, value in steps[0].items()
        if key.startswith("eval_")
    }
    return {**metrics, "before": before}


def _find(values: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path in nested mappings; None if there is none."""
    if path in values:
        return values[path]
    for key, inner in values.items():
        if isinstance(inner, Mapping) and path.startswith(f"{key}."):
            found = _find(inner, path.removeprefix(f"{key}."))
            if found is not None:
                return found
    return None
