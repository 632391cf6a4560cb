"""Confidence intervals of proportions and of means over seeds."""

from collections.abc import Sequence

from scipy import stats

CONFIDENCE = 0.95


def proportion_interval(fraction: float, count: int) -> list[float]:
    """Return the 95 % interval of a proportion (Wilson 1927).

    Args:
        fraction: Successes divided by count.
        count: Number of independent trials.
    """
    test = stats.binomtest(round(fraction * count), count)
    interval = test.proportion_ci(CONFIDENCE, method="wilson")
    return [float(interval.low), float(interval.high)]


def mean_interval(values: Sequence[float]) -> list[float]:
    """Return the 95 % interval of the mean of independent values (Student's t).

    It has no width for equal values.
    """
    mean, error = stats.tmean(values), stats.sem(values)
    if error == 0:
        return [float(mean)] * 2
    interval = stats.t.interval(CONFIDENCE, len(values) - 1, loc=mean, scale=error)
    return [float(bound) for bound in interval]
