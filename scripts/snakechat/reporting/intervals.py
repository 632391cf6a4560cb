"""Confidence intervals of proportions, ratios, means over seeds and their differences."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import special, stats

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
    values: Sequence[float], lower: float | None = None, upper: float | None = None
) -> list[float]:
    """Return the 95 % interval of the mean of independent values.

    It is Student's t interval on a scale without bounds: the logarithm of the distance from a lower
    bound, or the logit between two bounds. The mean is transformed, not the values, with its
    standard error by the delta method. So the interval contains the arithmetic mean, stays within
    the bounds, and exists for values on a bound.

    Values outside of the bounds, such as a Monte Carlo estimate of a KL below 0, have Student's
    interval without bounds. Equal values have an interval without width.

    Args:
        values: At least two values.
        lower: Lower bound of the metric, if any.
        upper: Upper bound of a metric with a lower bound, if any.
    """
    mean, error = float(stats.tmean(values)), float(stats.sem(values))
    if error == 0:
        return [mean, mean]
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * error
    if lower is None or min(values) < lower or (upper is not None and max(values) > upper):
        bounds = [mean - half, mean + half]
    elif upper is None:
        factor = math.exp(half / (mean - lower))
        bounds = [lower + (mean - lower) / factor, lower + (mean - lower) * factor]
    else:
        width = upper - lower
        fraction = (mean - lower) / width
        half /= width * fraction * (1 - fraction)
        logits = (special.logit(fraction) + sign * half for sign in (-1, 1))
        bounds = [lower + width * float(special.expit(logit)) for logit in logits]
    # Rounding errors of the transformations.
    return [min(bounds[0], mean), max(bounds[1], mean)]


def ratio_interval(numerators: np.ndarray, denominators: np.ndarray) -> list[float] | None:
    """Return the 95 % interval of sum(numerators) / sum(denominators) over independent rows.

    The standard error is that of a ratio estimator (Cochran 1977, eq. 6.13), with Student's
    quantile.

    Args:
        numerators, denominators: Those of each row [n], such as nats and tokens.

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

    Returns:
        None if one of them has less than two values, or if the values of each are equal: they say
        nothing about the variance.
    """
    if min(len(values), len(others)) < 2:
        return None
    if len(set(values)) == len(set(others)) == 1:
        return None
    # Not scipy.stats.ttest_ind, which warns if one of them has equal values.
    variances = [float(stats.sem(each)) ** 2 for each in (values, others)]
    counts = [len(values), len(others)]
    freedom = sum(variances) ** 2 / sum(
        variance**2 / (count - 1) for variance, count in zip(variances, counts, strict=True)
    )
    difference = stats.tmean(values) - stats.tmean(others)
    error = math.sqrt(sum(variances))
    interval = stats.t.interval(CONFIDENCE, freedom, loc=difference, scale=error)
    return [float(bound) for bound in interval]
