"""95 % confidence intervals of shares, means, ratios and differences.

Rows whose prompts have the same text are not independent, and form a cluster. An estimate has an
influence of each row, its contribution to the error, with sum 0. The variance of the estimate is
estimated from the sums of the influences of the clusters (Cochran 1977, chapter 9).

Shapes: n rows, C clusters.
"""

import math
import warnings
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
TAILS = (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2
# Few values of a skewed distribution underestimate its skewness. With this factor, intervals of
# means of 10 to 200 lognormal values contain the true one in 93 to 96 % of simulations.
SKEWNESS_FACTOR = 1.25


def clusters_of(prompts: Iterable[Hashable]) -> np.ndarray:
    """Return the number of the cluster [n] of each row: rows with equal prompts share one."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], np.int64)


def mean_with_interval(
    values: np.ndarray, clusters: np.ndarray, low: float = 0.0, high: float = 1.0
) -> tuple[float, list[float] | None]:
    """Return the mean of values [n] and its interval.

    Values between low and high are shares, if these are their limits: their interval stays between
    the limits, and has a width even if all values are equal. NaN is no value.

    Returns:
        An interval of None if other values are equal, or have a single cluster; a mean of NaN
        without values.
    """
    known = ~np.isnan(values)
    values, clusters = np.asarray(values, dtype=np.float64)[known], np.asarray(clusters)[known]
    if not len(values):
        return math.nan, None
    mean = float(values.mean())
    influences = (values - mean) / len(values)
    if low < high and low <= values.min() and values.max() <= high:
        share = (mean - low) / (high - low)
        bounds = share_interval(share, influences / (high - low), clusters)
        return mean, [low + bound * (high - low) for bound in bounds]
    return mean, estimate_interval(mean, influences, clusters)


def share_interval(
    share: float, influences: np.ndarray, clusters: np.ndarray, count: int | None = None
) -> list[float]:
    """Return the interval of a share, from 0 to 1 (Korn and Graubard 1998).

    The exact interval of a binomial proportion (Clopper and Pearson 1934) of the effective number
    of trials: share * (1 - share) / variance, reduced for the degrees of freedom. Without any
    variance, which is usual of shares near 0 and 1, each cluster is a trial that does not differ.

    count: The degrees of freedom + 1; by default, the number of clusters.
    """
    sums = _cluster_sums(influences, clusters)
    count = count or len(sums)
    if count < 2:
        return [0.0, 1.0]
    error = _standard_error(sums)
    trials = share * (1 - share) / error**2 if error > 1e-12 else len(sums)
    trials *= (stats.norm.ppf(TAILS[1]) / stats.t.ppf(TAILS[1], count - 1)) ** 2
    # A share of 1 may exceed it by rounding.
    share = min(max(share, 0.0), 1.0)
    if error <= 1e-12 or share in (0, 1):
        differing = 1 - float(TAILS[0] ** (1 / trials))
        return [share * (1 - differing), share + (1 - share) * differing]
    successes, failures = share * trials, (1 - share) * trials
    low = stats.beta.ppf(TAILS[0], successes, failures + 1)
    return [float(low), float(stats.beta.ppf(TAILS[1], successes + 1, failures))]


def estimate_interval(
    estimate: float, influences: np.ndarray, clusters: np.ndarray
) -> list[float] | None:
    """Return the interval of an estimate; None for a single cluster, or without any variance.

    Student's interval, widened to one that is transformed for the skewness of the influences (Hall
    1992, "On the removal of skewness by transformation").
    """
    sums = _cluster_sums(influences, clusters)
    count, error = len(sums), _standard_error(sums)
    if count < 2 or error <= 1e-12 * abs(estimate):
        return None
    half = float(stats.t.ppf(TAILS[1], count - 1))
    low, high = -half, half
    scaled = SKEWNESS_FACTOR * float(stats.skew(sums, bias=False)) / math.sqrt(count)
    if abs(scaled) > 1e-3:
        low, high = (
            3 / scaled * float(np.cbrt(1 + scaled * (quantile - scaled / 6)) - 1)
            for quantile in (low, high)
        )
    return [estimate - error * max(high, half), estimate - error * min(low, -half)]


def ratio_interval(
    numerators: np.ndarray, denominators: np.ndarray, clusters: np.ndarray
) -> list[float] | None:
    """Return the interval of sum(numerators) / sum(denominators) (Cochran 1977, eq. 6.13).

    Args:
        numerators, denominators: Such as the nats and the tokens of each row [n].

    Returns:
        None as estimate_interval does.
    """
    total = denominators.sum()
    ratio = float(numerators.sum() / total)
    return estimate_interval(ratio, (numerators - ratio * denominators) / total, clusters)


def _cluster_sums(influences: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Return the sums [C] of the influences of each cluster."""
    _, numbers = np.unique(clusters, return_inverse=True)
    return np.bincount(numbers, influences)


def _standard_error(sums: np.ndarray) -> float:
    return math.sqrt(len(sums) / max(len(sums) - 1, 1) * float((sums**2).sum()))


def mean_interval(
    values: Sequence[float], lower: float = -math.inf, upper: float = math.inf
) -> list[float]:
    """Return Student's interval of the mean of independent values, cut off at bounds.

    Equal values have an interval without width.

    Args:
        values: At least two values, such as one for each seed.
        lower, upper: The lowest and the highest possible value.
    """
    mean, error = float(stats.tmean(values)), float(stats.sem(values))
    half = float(stats.t.ppf(TAILS[1], len(values) - 1)) * error
    return [max(mean - half, lower), min(mean + half, upper)]


def difference_interval(values: Sequence[float], others: Sequence[float]) -> list[float] | None:
    """Return the interval of mean(values) - mean(others) (Welch 1947).

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
