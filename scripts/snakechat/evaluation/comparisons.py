"""Comparison of models by their responses to the same prompts, and 95 % confidence intervals.

Rows whose prompts have the same text are not independent, and form a cluster. An estimate has an
influence of each row, its contribution to the error, with sum 0. The variance of the estimate is
estimated from the sums of the influences of the clusters (Cochran 1977, chapter 9).

Shapes: n prompts or rows, S responses of each model to each prompt, C clusters.
"""

import math
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

# Metrics [S, n] by name; [1, n] for a metric with one value for each prompt. A score is NaN where
# no reward function judges a response, and means and comparisons are without it.
ResponseMetrics = dict[str, np.ndarray]

# Models that RLHF may start from, the last one in training first.
INITIAL_MODELS = ("dpo", "sft", "base")
# Numbers of responses of which one passes.
PASS_AT = (1, 4, 16)

CONFIDENCE = 0.95
TAILS = (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2
# Of the normal distribution: 1.96.
NORMAL_QUANTILE = NormalDist().inv_cdf(TAILS[1])
# Few values of a skewed distribution underestimate its skewness. With this factor, intervals of
# means of 10 to 200 lognormal values contain the true one in 93 to 96 % of simulations.
SKEWNESS_FACTOR = 1.25


def initial_model(models: Container[str]) -> str:
    """Return which of the models is the one that RLHF started from: dpo, sft or base."""
    return next(name for name in INITIAL_MODELS if name in models)


def evaluated_models(inputs: Mapping[str, Path]) -> dict[str, Path]:
    """Return {name: folder} of the models that a job compares, in the order of training."""
    others = [name for name in inputs if name.startswith("compare_with.")]
    names = [name for name in ("base", "sft", *others, "dpo", "rlhf") if name in inputs]
    folders = {name.removeprefix("compare_with."): inputs[name] for name in names}
    if "rlhf" in inputs and (inputs["rlhf"] / "ema").is_dir():
        folders["ema"] = inputs["rlhf"] / "ema"
    return folders


def pass_rates(passed: np.ndarray) -> ResponseMetrics:
    """Return pass_at_K [1, n]: unbiased estimates of the probability that one of K passes.

    It is 1 - C(S - c, K) / C(S, K) where c of S responses pass (Chen et al. 2021,
    arxiv.org/abs/2107.03374).

    passed: 1 for a response that passes, 0 for others [S, n]; NaN if nothing judges it, and then
        the prompt has no estimate.
    """
    number = len(passed)
    # Without a count, the last place: NaN.
    places = np.nan_to_num(passed.sum(axis=0), nan=number + 1).astype(int)
    tables = {
        k: [1 - math.comb(number - c, k) / math.comb(number, k) for c in range(number + 1)]
        for k in PASS_AT
        if k <= number
    }
    return {
        f"pass_at_{k}": np.take([*rates, math.nan], places)[None] for k, rates in tables.items()
    }


def compare(
    models: Mapping[str, ResponseMetrics], scores: Sequence[str], prompts: Sequence[str]
) -> dict[str, Any]:
    """Compare models with the one that RLHF started from, by the metrics of their responses.

    Args:
        scores: Names of the metrics that decide wins.
        prompts: Texts of the prompts [n]. Rows with equal prompts are not independent.

    Returns:
        The means of each model by its name; intervals_95 of these means; for each model but the
        initial one, the difference from it in each score and in success; wins of each model over
        those that were trained before it: dpo, sft and base, where they exist.
    """
    models = without_unknown_metrics(models)
    initial = initial_model(models)
    num_generations, num_prompts = models[initial]["length"].shape
    clusters = clusters_of(prompts)
    metrics: dict[str, Any] = {
        "num_prompts": num_prompts,
        "num_generations": num_generations,
        "intervals_95": {},
        "wins": {},
    }
    for name, values in models.items():
        # Responses to the same prompt are correlated: their mean is one observation.
        means = {key: mean_with_interval(prompt_means(of), clusters) for key, of in values.items()}
        metrics[name] = {key: mean for key, (mean, _) in means.items()}
        metrics["intervals_95"][name] = {key: interval for key, (_, interval) in means.items()}
        for key in (*scores, "success"):
            if name != initial and key in values:
                prefix = "" if name == "rlhf" else f"{name}_"
                difference = mean_difference(values[key], models[initial][key], clusters)
                metrics[f"{prefix}{key}_difference"] = difference
        place = INITIAL_MODELS.index(name) + 1 if name in INITIAL_MODELS else 0
        wins = {
            other: {
                key: win_rates(values, models[other], key, clusters)
                for key in scores
                if key in values
            }
            for other in INITIAL_MODELS[place:]
            if other in models
        }
        metrics["wins"] |= {name: wins} if wins else {}
    return metrics


def means_by_dataset(
    models: Mapping[str, ResponseMetrics], datasets: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return num_prompts and the means of each model, of each dataset of the prompts [n]."""
    means: dict[str, dict[str, Any]] = {}
    for dataset in dict.fromkeys(datasets):
        mask = np.equal(datasets, dataset)
        means[dataset] = {"num_prompts": int(mask.sum())}
        for name, values in models.items():
            means[dataset][name] = {
                key: float(np.nanmean(value[:, mask]))
                for key, value in values.items()
                if not np.isnan(value[:, mask]).all()
            }
    return means


def without_unknown_metrics(models: Mapping[str, ResponseMetrics]) -> dict[str, ResponseMetrics]:
    """Return metrics without the ones that all models have of no prompt."""
    unknown = {
        key
        for key in {key for values in models.values() for key in values}
        if np.isnan(sum(prompt_means(v[key]) for v in models.values() if key in v)).all()
    }
    return {
        name: {key: value for key, value in values.items() if key not in unknown}
        for name, values in models.items()
    }


def prompt_means(values: np.ndarray) -> np.ndarray:
    """Return the mean [n] of values [..., n] for each prompt, without NaN; NaN if all are NaN."""
    values = np.asarray(values, dtype=np.float64).reshape(-1, np.shape(values)[-1])
    counts = (~np.isnan(values)).sum(axis=0)
    return np.where(counts > 0, np.nansum(values, axis=0) / np.maximum(counts, 1), np.nan)


def mean_difference(ours: np.ndarray, theirs: np.ndarray, clusters: np.ndarray) -> dict[str, Any]:
    """Return the mean difference of two metrics [S, n], paired by prompt, and its interval."""
    are_shares = all(np.nanmin(values) >= 0 and np.nanmax(values) <= 1 for values in (ours, theirs))
    low, high = (-1, 1) if are_shares else (0, 0)
    difference = prompt_means(ours) - prompt_means(theirs)
    mean, interval = mean_with_interval(difference, clusters, low, high)
    return {"mean": mean, "interval_95": interval}


def win_rates(
    ours: ResponseMetrics, theirs: ResponseMetrics, key: str, clusters: np.ndarray
) -> dict[str, Any]:
    """Return how often a response of one model scores higher than a response of another one.

    Each response is compared with each response of the other model to the same prompt, which is of
    clusters [n]; a tie is half a win. Additionally the influence of length: how often our response
    is longer (longer), and the win rates of longer and of other responses (when_longer,
    when_not_longer).
    """
    # Of each of our responses to each of theirs [S, S, n]; NaN if one of the two is NaN.
    won = np.sign(ours[key][:, None] - theirs[key][None, :]) / 2 + 0.5
    longer = ours["length"][:, None] > theirs["length"][None, :]
    mean, interval = mean_with_interval(prompt_means(won), clusters)
    rates: dict[str, Any] = {"mean": mean, "interval_95": interval, "longer": float(longer.mean())}
    for name, mask in (("when_longer", longer), ("when_not_longer", ~longer)):
        if not np.isnan(won[mask]).all():
            rates[name] = float(np.nanmean(won[mask]))
    return rates


def distinct_n(ids: Sequence[int], n: int) -> float:
    """Return the number of distinct n-grams of a response divided by the number of its n-grams.

    1 for responses of fewer than n tokens. Li et al. 2016, section 5, applied to one response.
    """
    ngrams = [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0


def repetition(ids: Sequence[int]) -> float:
    """Return the share of a response's n-grams of 4 tokens that occurred before in it."""
    return 1 - distinct_n(ids, 4)


# --- intervals ----------------------------------------------------------------------------------


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
    return [
        beta_quantile(TAILS[0], successes, failures + 1),
        beta_quantile(TAILS[1], successes + 1, failures),
    ]


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
