"""Confidence intervals of proportions, ratios, means over seeds and their differences."""

import math
import warnings
from collections.abc import Sequence

import numpy as np
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


def mean_interval(
    values: Sequence[float], lower: float = -math.inf, upper: float = math.inf
) -> list[float]:
    """Return Student's 95 % interval of the mean of independent values, cut off at bounds.

    Equal values have an interval without width.

    Args:
        values: At least two values.
        lower, upper: The lowest and the highest possible value.
    """
    mean, error = float(stats.tmean(values)), float(stats.sem(values))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error
    return [max(mean - half, lower), min(mean + half, upper)]


def ratio_interval(numerators: np.ndarray, denominators: np.ndarray) -> list[float] | None:
    """Return the 95 % interval of sum(numerators) / sum(denominators) over independent rows.

    It has the standard error of a ratio estimator (Cochran 1977, eq. 6.13) and Student's quantile.

    Args:
        numerators, denominators: Such as the nats and the tokens of each row [n].

    Returns:
        None for fewer than two rows.
    """
    count = len(numerators)
    if count < 2:
        return None
    ratio = float(numerators.sum() / denominators.sum())
    residuals = numerators - ratio * denominators
    variance = count / (count - 1) * float((residuals**2).sum()) / float(denominators.sum()) ** 2
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * math.sqrt(variance)
    return [ratio - half, ratio + half]


def difference_interval(values: Sequence[float], others: Sequence[float]) -> list[float] | None:
    """Return the 95 % interval of mean(values) - mean(others) (Welch 1947).

    Args:
        values, others: At least two values each.

    Returns:
        None if the values of each are equal: they say nothing about the variance.
    """
    if len(set(values)) == len(set(others)) == 1:
        return None
    # Equal values of one of them make the test warn.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        interval = stats.ttest_ind(values, others, equal_var=False).confidence_interval(CONFIDENCE)
    return [float(interval.low), float(interval.high)]
