"""Comparison of models: means, intervals, differences, win rates, repetition."""

import numpy as np
import pytest

from snakechat.evaluation.comparisons import compare, distinct_n, pass_rates, repetition, win_rates

SCORES = ("score", "judge_score")
MODELS = {
    # Two responses to each of three prompts, [S, n].
    "sft": {"length": [[1, 2, 3], [3, 2, 1]], "score": [[0, 1, 2], [2, 1, 0]]},
    "rlhf": {"length": [[4, 4, 4], [4, 4, 4]], "score": [[1, 3, 2], [2, 1, 3]]},
    "ema": {"length": [[5, 5, 5], [5, 5, 5]], "score": [[0, 0, 0], [0, 0, 0]]},
}
for name, metrics in MODELS.items():
    metrics |= {"success": [[name == "rlhf"] * 3] * 2}


def arrays(models):
    return {
        name: {key: np.array(values) for key, values in metrics.items()}
        for name, metrics in models.items()
    }


def test_means_intervals_and_differences():
    metrics = compare(arrays(MODELS), SCORES, ["a", "b", "c"])
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


# Win rates.


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


# Repetition.


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
