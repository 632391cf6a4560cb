"""Comparison of models and intervals: by hand, against published values and by simulation."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

from snakechat.evaluation.comparisons import (
    clusters_of,
    compare,
    difference_interval,
    distinct_n,
    mean_with_interval,
    pass_rates,
    ratio_interval,
    repetition,
    share_interval,
    win_rates,
)
from snakechat.evaluation.held_out_rows import auc_with_interval

SCORES = ("score", "judge_score")
MODELS = {
    # Two responses to each of three prompts, [S, n].
    "sft": {"length": [[1, 2, 3], [3, 2, 1]], "score": [[0, 1, 2], [2, 1, 0]]},
    "rlhf": {"length": [[4, 4, 4], [4, 4, 4]], "score": [[1, 3, 2], [2, 1, 3]]},
    "ema": {"length": [[5, 5, 5], [5, 5, 5]], "score": [[0, 0, 0], [0, 0, 0]]},
}
for name, metrics in MODELS.items():
    metrics |= {"success": [[name == "rlhf"] * 3] * 2}
    metrics |= {key: np.array(values) for key, values in metrics.items()}


def test_means_intervals_and_differences():
    metrics = compare(MODELS, SCORES, ["a", "b", "c"])
    assert metrics["num_prompts"] == 3 and metrics["num_generations"] == 2
    assert metrics["sft"] == {"length": 2, "score": 1, "success": 0}
    assert metrics["rlhf"] == {"length": 4, "score": 2, "success": 1}
    assert metrics["intervals_95"].keys() == MODELS.keys()
    # Means per prompt: 2, 2, 2 and 1.5, 2, 2.5, of standard deviation 1/2; t of two degrees of
    # freedom is 4.303.
    half = 4.3027 / 2 / 3**0.5
    assert metrics["intervals_95"]["sft"]["length"] is None
    assert metrics["intervals_95"]["rlhf"]["score"] == pytest.approx([2 - half, 2 + half], abs=1e-4)
    # Differences are paired by prompt: .5, 1, 1.5.
    assert metrics["score_difference"]["mean"] == 1
    interval = metrics["score_difference"]["interval_95"]
    assert interval == pytest.approx([1 - half, 1 + half], abs=1e-4)
    # Scores may have any value, of which equal ones have no interval; shares have limits.
    assert metrics["ema_score_difference"] == {"mean": -1, "interval_95": None}
    assert metrics["success_difference"]["mean"] == metrics["success_difference"]["interval_95"][1]
    assert metrics["success_difference"]["interval_95"][0] < 0.5
    assert metrics["ema_success_difference"]["mean"] == 0


def rates_of(ours, theirs):
    """Win rates of responses to one prompt, with the given scores and lengths."""
    ours, theirs = ({key: np.array(each) for key, each in them.items()} for them in (ours, theirs))
    return win_rates(ours, theirs, "score", np.arange(1))


def test_win_rates_by_hand():
    # 1 and 3 against 2 and 3. Of four pairs, 3 > 2 is a win and 3 = 3 half a win.
    metrics = rates_of(
        {"score": [[1], [3]], "length": [[5], [9]]}, {"score": [[2], [3]], "length": [[5], [7]]}
    )
    assert metrics == {
        "mean": 1.5 / 4,
        "interval_95": [0, 1],
        # The second response is longer than both of theirs, with 1.5 wins.
        "longer": 0.5,
        "when_longer": 0.75,
        "when_not_longer": 0.0,
    }
    # Rates without any pair are omitted.
    one = {"score": [[1.0]], "length": [[2]]}
    metrics = rates_of(one, {"score": [[0.0]], "length": [[1]]})
    assert "when_not_longer" not in metrics and metrics["when_longer"] == 1


def test_distinct_and_repeated_n_grams_by_hand():
    ids = [1, 2, 1, 2, 1]
    assert distinct_n(ids, 1) == 2 / 5
    # (1, 2), (2, 1), (1, 2), (2, 1).
    assert distinct_n(ids, 2) == 2 / 4
    assert distinct_n([1], 2) == 1
    # The 4-gram 1111 occurs twice.
    assert [repetition(row) for row in ([1, 2, 3, 4, 5], [1] * 5, [1] * 3)] == [0, 0.5, 0]


def test_pass_rates():
    # Of 4 responses, 0, 1, 2, 4 pass; of the last prompt, one has no score.
    passed = np.array([[0, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 1, np.nan]])
    rates = pass_rates(passed)
    assert rates.keys() == {"pass_at_1", "pass_at_4"}
    np.testing.assert_allclose(rates["pass_at_1"], [[0, 1 / 4, 2 / 4, 1, np.nan]])
    np.testing.assert_allclose(rates["pass_at_4"], [[0, 1, 1, 1, np.nan]])
    # 16 of 18: all but the C(17, 16) = 17 choices of C(18, 16) = 153 without the one that passes.
    passed = np.zeros((18, 1))
    passed[3] = 1
    np.testing.assert_allclose(pass_rates(passed)["pass_at_16"], [[1 - 17 / 153]])


# --- intervals ----------------------------------------------------------------------------------

SIMULATIONS = 500
normal_cdf = NormalDist().cdf


def test_rows_with_equal_prompts_are_one_observation():
    assert clusters_of(["a", "b", "a", "c"]).tolist() == [0, 1, 0, 2]
    values, clusters = np.array([3.0, 5.0, 10.0]), np.arange(3)
    mean, interval = mean_with_interval(values, clusters)
    assert mean == 6
    repeated = mean_with_interval(values.repeat(5), clusters.repeat(5))
    assert repeated[0] == 6 and repeated[1] == pytest.approx(interval)
    # A single prompt says nothing about others.
    assert mean_with_interval(values, np.zeros(3)) == (6, None)
    assert mean_with_interval(values / 10, np.zeros(3)) == (pytest.approx(0.6), [0, 1])


def test_equal_shares_have_an_interval_with_a_width():
    # Clopper and Pearson: none of n failures has the upper bound 1 - 0.025 ** (1 / n), here of
    # n = 5 * (1.960 / 2.776) ** 2 trials.
    rare = 0.025 ** (1 / (5 * (1.95996 / 2.77645) ** 2))
    _, interval = mean_with_interval(np.ones(5), np.arange(5))
    assert interval == [pytest.approx(rare, 1e-4), 1]
    # So may other clusters than these be rare, wherever the share lies: 0 in place of 0.7 here.
    _, interval = mean_with_interval(np.full(5, 0.7), np.arange(5))
    assert interval == pytest.approx([0.7 * rare, 0.7 + 0.3 * (1 - rare)], rel=1e-4)
    _, (low, high) = mean_with_interval(np.zeros(5), np.arange(5), -1, 1)
    assert low == pytest.approx(-high) and 0.5 < high < 1


def test_interval_of_a_share_by_hand():
    # Eight of ten, as 9 * (1.960 / 2.262) ** 2 = 6.756 trials: quantiles of the beta distributions
    # of 5.405 and 2.351, and of 6.405 and 1.351.
    _, interval = mean_with_interval(np.arange(10) < 8, np.arange(10))
    assert interval == pytest.approx([0.3572, 0.9883], abs=1e-4)


def test_values_that_say_nothing_about_the_variance_have_no_interval():
    assert mean_with_interval(np.full(5, 2.3), np.arange(5)) == (pytest.approx(2.3), None)
    assert mean_with_interval(np.zeros(5), np.arange(5), 0, 0) == (0, None)
    assert ratio_interval(np.ones(3), np.full(3, 10), np.arange(3)) is None
    assert ratio_interval(np.ones(1), np.ones(1), np.arange(1)) is None
    assert difference_interval([1.0, 1.0], [2.0, 2.0]) is None
    assert difference_interval([1.0, 1.0], [2.0, 4.0]) is not None
    assert difference_interval([1.0, math.nan], [2.0, 4.0]) is None
    # An undefined share may be any.
    assert share_interval(math.nan, np.array([0.1, -0.1, 0.3]), np.arange(3)) == [0, 1]


# What is simulated, its true value, and a function that returns an interval of it.
rng = np.random.default_rng(1)


def shares(num_prompts, probability):
    return mean_with_interval(rng.random(num_prompts) < probability, np.arange(num_prompts))[1]


def pairs_of_one_prompt(num_prompts, repeats):
    clusters = np.arange(num_prompts).repeat(repeats)
    correct = rng.random(len(clusters)) < rng.beta(3, 1, size=num_prompts)[clusters]
    return mean_with_interval(correct, clusters)[1]


def success_differences(num_prompts):
    ours, theirs = (rng.random((4, num_prompts)) < share for share in (0.98, 0.9))
    difference = ours.mean(axis=0) - theirs.mean(axis=0)
    return mean_with_interval(difference, np.arange(num_prompts), -1, 1)[1]


def means(num_prompts, draw, repeats=1):
    clusters = np.arange(num_prompts).repeat(repeats)
    # Far from the limits of shares.
    return mean_with_interval(10 + draw(size=num_prompts)[clusters], clusters)[1]


def aucs(num_good, num_bad, shift):
    good, bad = (torch.from_numpy(rng.normal(size=size)) for size in (num_good, num_bad))
    clusters = (torch.arange(num_good), num_good + torch.arange(num_bad))
    return auc_with_interval((good + shift, bad), clusters)[1]


COVERAGE = [
    *(((shares, n, p), p) for n in (5, 20) for p in (0.5, 0.98)),
    *(((pairs_of_one_prompt, n, m), 0.75) for n, m in ((20, 5), (100, 20))),
    ((success_differences, 20), 0.08),
    *(((means, n, rng.exponential), 11) for n in (10, 100)),
    *(((means, n, rng.lognormal, 4), 10 + math.exp(0.5)) for n in (20, 200)),
    *(((aucs, 20, 10, shift), normal_cdf(shift / 2**0.5)) for shift in (0.5, 2.5)),
]


@pytest.mark.parametrize(("simulation", "truth"), COVERAGE)
def test_95_of_100_intervals_contain_the_true_value(simulation, truth):
    function, *arguments = simulation
    intervals = [function(*arguments) for _ in range(SIMULATIONS)]
    covered = np.mean([low <= truth <= high for low, high in intervals])
    # At least 93 %; two standard errors of the simulation are 2 %.
    assert covered > 0.93 - 0.02


def test_interval_of_a_skewed_mean_by_hand():
    # 0, 0, 3: mean 1, standard error 1, adjusted skewness sqrt(3), so that the scaled one is 1.25;
    # t 4.3027: 3 / 1.25 * (cbrt(1 + 1.25 * (4.3027 - 0.2083)) - 1) = 1.9895, less than t, and
    # 3 / 1.25 * (cbrt(1 + 1.25 * (-4.3027 - 0.2083)) - 1) = -6.4026.
    mean, interval = mean_with_interval(np.array([0.0, 0, 3]), np.arange(3))
    assert mean == 1 and interval == pytest.approx([1 - 4.3027, 1 + 6.4026], abs=1e-3)
