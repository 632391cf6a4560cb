"""95 % confidence intervals of shares, means, ratios and differences.

Rows whose prompts have the same text are not independent, and form a cluster. An estimate has an
influence of each row, its contribution to the error, with sum 0. The variance of the estimate is
estimated from the sums of the influences of the clusters (Cochran 1977, chapter 9).

Shapes: n rows, C clusters.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from itertools import count
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
TAILS = (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2
# Of the normal distribution: 1.96.
NORMAL_QUANTILE = NormalDist().inv_cdf(TAILS[1])
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
    """Return the mean of values [n] and its interval; NaN does not count.

    Values between low and high are shares, if these are their limits: their interval stays between
    the limits, and has a width even if all values are equal. Other values have None if they are
    equal or have a single cluster. The mean is NaN without values.
    """
    known = ~np.isnan(values)
    values, clusters = np.asarray(values, dtype=np.float64)[known], np.asarray(clusters)[known]
    if not len(values):
        return math.nan, None
    mean, width = float(values.mean()), high - low
    influences = (values - mean) / len(values)
    if width > 0 and low <= values.min() and values.max() <= high:
        bounds = share_interval((mean - low) / width, influences / width, clusters)
        return mean, [low + bound * width for bound in bounds]
    return mean, estimate_interval(mean, influences, clusters)


def share_interval(
    share: float, influences: np.ndarray, clusters: np.ndarray, number: int | None = None
) -> list[float]:
    """Return the interval of a share, from 0 to 1 (Korn and Graubard 1998).

    The exact interval of a binomial proportion (Clopper and Pearson 1934) of the effective number
    of trials: share * (1 - share) / variance, reduced for the degrees of freedom. Without any
    variance, which is usual of shares near 0 and 1, each cluster is a trial that does not differ.

    number: The degrees of freedom + 1; defaults to the number of clusters.
    """
    sums, error = _sums_and_error(influences, clusters)
    number = number or len(sums)
    if number < 2 or math.isnan(share):
        return [0.0, 1.0]
    trials = share * (1 - share) / error**2 if error > 1e-12 else len(sums)
    trials *= (NORMAL_QUANTILE / student_quantile(number - 1)) ** 2
    # A share of 1 may exceed it by rounding.
    share = min(max(share, 0.0), 1.0)
    if error <= 1e-12 or share in (0, 1):
        differing = 1 - float(TAILS[0] ** (1 / trials))
        return [share * (1 - differing), share + (1 - share) * differing]
    successes, failures = share * trials, (1 - share) * trials
    low = beta_quantile(TAILS[0], successes, failures + 1)
    return [low, beta_quantile(TAILS[1], successes + 1, failures)]


def estimate_interval(
    estimate: float, influences: np.ndarray, clusters: np.ndarray
) -> list[float] | None:
    """Return the interval of an estimate; None for a single cluster, or without any variance.

    Student's interval, widened to one that is transformed for the skewness of the influences (Hall
    1992, "On the removal of skewness by transformation").
    """
    sums, error = _sums_and_error(influences, clusters)
    number = len(sums)
    if number < 2 or error <= 1e-12 * abs(estimate):
        return None
    half = student_quantile(number - 1)
    low, high = -half, half
    scaled = SKEWNESS_FACTOR * _skewness(sums) / math.sqrt(number)
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

    They are such as the nats and the tokens of each row [n]. None as estimate_interval returns it.
    """
    total = denominators.sum()
    ratio = float(numerators.sum() / total)
    return estimate_interval(ratio, (numerators - ratio * denominators) / total, clusters)


def _sums_and_error(influences: np.ndarray, clusters: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the sums [C] of the influences of each cluster, and the standard error."""
    sums = np.bincount(np.unique(clusters, return_inverse=True)[1], influences)
    return sums, math.sqrt(len(sums) / max(len(sums) - 1, 1) * float((sums**2).sum()))


def _skewness(sums: np.ndarray) -> float:
    """Return the adjusted Fisher-Pearson skewness of sums [C] that differ; 0 of two."""
    number, centered = len(sums), sums - sums.mean()
    if number < 3:
        return 0.0
    skewness = float((centered**3).mean() / (centered**2).mean() ** 1.5)
    return skewness * math.sqrt(number * (number - 1)) / (number - 2)


def mean_interval(
    values: Sequence[float], lower: float = -math.inf, upper: float = math.inf
) -> list[float]:
    """Return Student's interval of the mean of two or more independent values, within bounds.

    Equal values, such as one for each seed, have an interval without width.
    """
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = student_quantile(len(values) - 1) * error
    return [max(mean - half, lower), min(mean + half, upper)]


def difference_interval(values: Sequence[float], others: Sequence[float]) -> list[float] | None:
    """Return the interval of mean(values) - mean(others), at least two each (Welch 1947).

    None if the values of each are equal, which says nothing about the variance, or one is NaN.
    """
    if len({*values}) == len({*others}) == 1 or not math.isfinite(sum(values) + sum(others)):
        return None
    squares = [float(np.var(each, ddof=1)) / len(each) for each in (values, others)]
    degrees = sum(squares) ** 2 / sum(
        square**2 / (len(each) - 1) for square, each in zip(squares, (values, others), strict=True)
    )
    difference = float(np.mean(values) - np.mean(others))
    half = student_quantile(degrees) * math.sqrt(sum(squares))
    return [difference - half, difference + half]


# --- quantiles ----------------------------------------------------------------------------------


@cache
def student_quantile(degrees: float) -> float:
    """Return the upper limit of the 95 % interval of Student's t with these degrees of freedom."""
    share = beta_quantile(CONFIDENCE, 0.5, degrees / 2)
    return math.sqrt(degrees * share / (1 - share))


@cache
def beta_quantile(probability: float, a: float, b: float) -> float:
    """Return the quantile of a beta distribution, by bisection."""
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if beta_probability(middle, a, b) < probability:
            low = middle
        else:
            high = middle
    return middle


def beta_probability(x: float, a: float, b: float) -> float:
    """Return the probability that a beta distribution has a value below x, with 0 < x < 1.

    The regularized incomplete beta function I_x(a, b), as a continued fraction (DLMF 8.17.22),
    which Lentz's method evaluates (Press et al. 2007, "Numerical Recipes", section 6.4).
    """
    if x > (a + 1) / (a + b + 2):
        # The fraction converges faster.
        return 1 - beta_probability(1 - x, b, a)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front += a * math.log(x) + b * math.log1p(-x)
    upper, lower = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = lower
    for m in count(1):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            upper, lower = 1 + term / upper, 1 / (1 + term * lower)
            fraction *= upper * lower
        if abs(upper * lower - 1) < 1e-15:
            break
    return math.exp(front) * fraction / a
