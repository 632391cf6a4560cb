"""Comparison of models by their responses to the same prompts: means, differences, win rates.

Shapes: n prompts, S responses of each model to each prompt.
"""

import math
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from snakechat.evaluation.intervals import clusters_of, mean_with_interval

# Metrics [S, n] by name; [1, n] for a metric with one value for each prompt. A score is NaN where
# no reward function judges a response, and means and comparisons are without it.
ResponseMetrics = dict[str, np.ndarray]

# Models that RLHF may start from, the last one in training first.
INITIAL_MODELS = ("dpo", "sft", "base")
# Tokens of an n-gram that counts as repetition when it occurs again.
REPETITION_N = 4
# Numbers of responses of which one passes.
PASS_AT = (1, 4, 16)


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
    """Return the share of a response's n-grams (REPETITION_N tokens) that occurred before in it."""
    return 1 - distinct_n(ids, REPETITION_N)
