"""How models compare: means, intervals, differences, wins, what a response repeats."""

import json

import numpy as np
import pytest

from snakechat.evaluation.comparisons import Draws, compare, distinct, repetition, wins

SCORES = ("score", "judge_score")
MODELS = {
    # Of three prompts two responses each, [S, n].
    "sft": {"length": [[1, 2, 3], [3, 2, 1]], "score": [[0, 1, 2], [2, 1, 0]]},
    "rlhf": {"length": [[4, 4, 4], [4, 4, 4]], "score": [[1, 3, 2], [2, 1, 3]]},
    "ema": {"length": [[5, 5, 5], [5, 5, 5]], "score": [[0, 0, 0], [0, 0, 0]]},
}


def arrays(models, **more):
    return {
        name: {key: np.array(values) for key, values in (figures | more).items()}
        for name, figures in models.items()
    }


def test_means_are_over_all_responses():
    figures = compare(arrays(MODELS), SCORES, 100, 1)
    assert figures["num_prompts"] == 3 and figures["num_generations"] == 2
    assert figures["sft"] == {"length": 2, "score": 1}
    assert figures["rlhf"] == {"length": 4, "score": 2}


def test_each_mean_has_its_interval():
    intervals = compare(arrays(MODELS), SCORES, 2000, 1)["intervals_95"]
    assert intervals.keys() == MODELS.keys()
    # Prompts' means are 2, 2, 2 and 1.5, 2, 2.5: the lowest drawn mean is 1.5.
    assert intervals["sft"]["length"] == [2, 2]
    assert intervals["rlhf"]["score"] == [1.5, 2.5]


def test_differences_to_the_sft_model_are_of_its_responses_to_the_same_prompt():
    figures = compare(arrays(MODELS), SCORES, 2000, 1)
    # Of the prompts' means, 1 each of the SFT model's: .5, 1, 1.5.
    assert figures["score_difference"]["mean"] == 1
    assert figures["score_difference"]["interval_95"] == [0.5, 1.5]
    # Each prompt's mean differs by 1: whatever prompts are drawn.
    assert figures["ema_score_difference"] == {"mean": -1, "interval_95": [-1, -1]}


def test_what_no_model_was_asked_for_is_not_told():
    figures = compare(arrays({name: MODELS[name] for name in ("sft", "rlhf")}), SCORES, 100, 1)
    told = {"num_prompts", "num_generations", "intervals_95", "wins", "sft", "rlhf", "score_difference"}
    assert figures.keys() == told
    assert figures["wins"].keys() == {"rlhf"}
    assert figures["wins"]["rlhf"].keys() == {"sft"}
    assert figures["wins"]["rlhf"]["sft"].keys() == {"score"}


def test_each_score_and_success_has_its_difference():
    zeros, ones = np.zeros((2, 3), bool), np.ones((2, 3), bool)
    models = arrays(MODELS)
    for name, values in (("sft", zeros), ("rlhf", ones), ("ema", zeros)):
        models[name] |= {"success": values, "judge_score": 2.0 * values}
        models[name] |= {"greedy_success": values[:1]}
    figures = compare(models, SCORES, 100, 1)
    assert figures["success_difference"] == {"mean": 1, "interval_95": [1, 1]}
    assert figures["judge_score_difference"] == {"mean": 2, "interval_95": [2, 2]}
    assert figures["ema_success_difference"]["mean"] == 0
    assert figures["rlhf"]["greedy_success"] == 1
    assert "greedy_success_difference" not in figures


# --- wins -------------------------------------------------------------------------------------


def won(ours, theirs, prompts):
    """Wins of responses with the scores and lengths of two dicts."""
    ours, theirs = ({key: np.array(each) for key, each in them.items()} for them in (ours, theirs))
    return wins(ours, theirs, "score", Draws(prompts, 200, 1))


def test_wins_by_hand():
    # One prompt: 1 and 3 against 2 and 3. Of four meetings 3 > 2 is a win, 3 = 3 half a one.
    figures = won(
        {"score": [[1], [3]], "length": [[5], [9]]}, {"score": [[2], [3]], "length": [[5], [7]]}, 1
    )
    assert figures == {
        "mean": 1.5 / 4,
        "interval_95": [1.5 / 4, 1.5 / 4],
        # The second response is longer than both, and wins once and a half.
        "longer": 0.5,
        "when_longer": 0.75,
        "when_not_longer": 0.0,
    }


def test_a_model_that_always_wins_by_being_longer_shows_it():
    figures = won(
        {"score": [[1.0, 0.0]], "length": [[9, 1]]}, {"score": [[0.0, 1.0]], "length": [[5, 5]]}, 2
    )
    assert (figures["mean"], figures["when_longer"], figures["when_not_longer"]) == (0.5, 1, 0)
    assert figures["interval_95"] == [0, 1]


def test_where_all_responses_are_longer_nothing_is_said_of_others():
    one = {"score": [[1.0]], "length": [[2]]}
    figures = won(one, {"score": [[0.0]], "length": [[1]]}, 1)
    assert "when_not_longer" not in figures and figures["when_longer"] == 1
    figures = won(one, one, 1)
    assert figures["mean"] == figures["when_not_longer"] == 0.5 and "when_longer" not in figures


def test_models_are_compared_with_the_base_model_too():
    models = arrays({"base": MODELS["ema"], **MODELS, "dpo/tiny": MODELS["sft"]})
    found = compare(models, SCORES, 100, 1)["wins"]
    assert {name: set(others) for name, others in found.items()} == {
        "sft": {"base"},
        "rlhf": {"sft", "base"},
        "ema": {"sft", "base"},
        "dpo/tiny": {"sft", "base"},
    }
    assert found["rlhf"]["base"]["score"]["mean"] == 1
    # Zeros against zeros.
    assert found["ema"]["base"]["score"]["mean"] == 0.5


# --- repetition -------------------------------------------------------------------------------


def test_distinct_n_grams_by_hand():
    ids = [1, 2, 1, 2, 1]
    assert distinct(ids, 1) == 2 / 5
    # (1, 2), (2, 1), (1, 2), (2, 1).
    assert distinct(ids, 2) == 2 / 4
    assert distinct([1], 2) == 1


def test_repetition_by_hand():
    assert repetition([1, 2, 3, 4, 5]) == 0
    # 1111 twice.
    assert repetition([1, 1, 1, 1, 1]) == 0.5
    assert repetition([1, 1, 1]) == 0


# --- intervals --------------------------------------------------------------------------------


def test_the_interval_of_constant_values_is_their_value():
    assert Draws(40, 200, 1).interval([0.25] * 40) == [0.25, 0.25]


def test_the_interval_of_normal_values_is_that_of_their_mean():
    values = np.random.default_rng(0).normal(3.0, 2.0, size=400)
    low, high = Draws(400, 4000, 1).interval(values)
    # Mean plus or minus 1.96 standard errors; 4,000 resamplings place the bounds to some percent.
    error = values.std() / 20
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)


def test_intervals_cover_the_true_mean_in_about_95_of_100_cases():
    random = np.random.default_rng(2)
    covered = 0
    for _ in range(200):
        low, high = Draws(60, 200, 3).interval(random.normal(1.0, 1.0, size=60))
        covered += low <= 1.0 <= high
    # 190 expected, with a deviation of 3.
    assert 178 <= covered <= 199


def test_the_interval_of_yes_and_no_values_is_between_0_and_1():
    low, high = Draws(10, 500, 1).interval([1.0] * 5 + [0.0] * 5)
    # 5 of 10: deviation of the mean .158.
    assert 0.1 <= low < 0.5 < high <= 0.9


def test_same_seed_same_interval():
    values = [0.1, 0.9, 0.4, 0.7, 0.2]
    assert Draws(5, 100, 5).interval(values) == Draws(5, 100, 5).interval(values)
    assert Draws(5, 100, 5).interval(values) != Draws(5, 100, 6).interval(values)


def test_interval_bounds_can_be_written_as_json():
    assert json.loads(json.dumps(Draws(2, 100, 5).interval([0.1, 0.9])))
