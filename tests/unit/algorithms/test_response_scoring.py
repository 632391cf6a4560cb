"""Scores of responses: functions, normalization, clipping, penalties, errors."""

import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from snakechat.algorithms import reward_sum
from snakechat.algorithms.experience import ScoreNormalization, TokenEvaluation
from snakechat.algorithms.reward_models import RewardModel
from snakechat.algorithms.reward_sum import RewardSum, Scores
from snakechat.algorithms.step_metrics import evaluation_metrics, score_metrics
from snakechat.workflow.errors import InputError

# Rows of the prompts; two responses to each.
ROWS = [70, 50]
ROLLOUTS = SimpleNamespace(
    device=torch.device("cpu"),
    ended=torch.ones(4, dtype=torch.bool),
    examples="token ids",
    decode=lambda: (["p", "q", "p", "q"], ["a", "bb", "ccc", "dddd"]),
)


@pytest.mark.parametrize(("rank", "num_calls"), [(0, 1), (1, 0)])
def test_only_rank_0_calls_functions(rank, num_calls, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    sums = torch.tensor([[5.0, 6.0, 7.0, 8.0]])
    calls, reduced = [], []
    monkeypatch.setattr(
        reward_sum, "all_reduce_sum", lambda scores: reduced.append(scores.tolist()) or sums
    )

    def function(prompts, responses, columns):
        calls.append(responses)
        return [1.0, 2.0, 3.0, 4.0]

    monkeypatch.setattr(reward_sum, "function_columns", lambda *_: {})
    scorer = RewardSum([], {"mine": (1.0, function)}, None)
    assert scorer.score(ROLLOUTS, 1, ROWS).sum.tolist() == sums[0].tolist()
    assert len(calls) == num_calls
    assert reduced == [[[1.0, 2.0, 3.0, 4.0] if num_calls else [0.0] * 4]]


@pytest.mark.parametrize(("index", "row", "value"), [(0, 70, math.nan), (3, 50, -math.inf)])
def test_a_non_finite_score_is_an_error_that_names_its_row(index, row, value, monkeypatch):
    scores = np.ones((2, 2))
    scores.flat[index] = value
    monkeypatch.setattr(reward_sum, "response_scores", lambda *_: scores)
    module = SimpleNamespace(on_device=lambda: contextlib.nullcontext())
    reward = RewardModel("reward/0", module, 1.0, None, True)
    with pytest.raises(InputError, match=f"step 12: the score of a response to row {row} is"):
        RewardSum([reward], {}, None).score(ROLLOUTS, 12, ROWS)


@pytest.mark.parametrize(("weight", "value"), [(1.0, 1e39), (10.0, 3e38), (-1e38, 5.0)])
def test_a_sum_that_overflows_is_an_error(weight, value, monkeypatch):
    monkeypatch.setattr(reward_sum, "function_columns", lambda *_: {})
    functions = {"mine": (weight, lambda *_: np.array([0.0, np.nan, 0.0, value]))}
    with pytest.raises(InputError, match=r"row 50 is -?inf, expected a finite number"):
        RewardSum([], functions, None).score(ROLLOUTS, 1, ROWS)


def test_none_of_a_function_is_no_part_of_the_sum(monkeypatch):
    monkeypatch.setattr(reward_sum, "function_columns", lambda *_: {})
    functions = {
        "math": (2.0, lambda *_: np.array([1.0, np.nan, np.nan, 3.0])),
        "code": (1.0, lambda *_: np.array([np.nan, 5.0, np.nan, 7.0])),
    }
    scores = RewardSum([], functions, None).score(ROLLOUTS, 1, ROWS)
    assert scores.sum.tolist() == pytest.approx([2, 5, math.nan, 13], nan_ok=True)
    metrics = score_metrics(scores)
    assert metrics["objective/scores"] == pytest.approx(20 / 3)
    assert metrics["rewards/math/mean"] == 2 and metrics["rewards/math/missing"] == 0.5
    # The others are normalized as if there were no such response: mean 5, deviation sqrt(18).
    normalization = make("first")
    normalized = normalize(normalization, 2.0, 5.0, math.nan, 8.0)
    assert normalized == pytest.approx([-(1.5**0.5), 0, math.nan, 1.5**0.5], nan_ok=True)


def test_the_metric_of_the_best_model_is_without_responses_that_nothing_judges():
    rollouts = SimpleNamespace(response_mask=torch.ones(3, 1), length_metrics=dict)
    evaluation = TokenEvaluation(torch.tensor([[0.5], [0.0], [1.0]]), *[torch.zeros(3, 1)] * 3)
    scores = torch.tensor([4.0, math.nan, 2.0])

    def reward(scores):
        return evaluation_metrics(
            "grpo", rollouts, evaluation, Scores(scores, {"mine": scores}, {}), scores, 0.1
        )["objective/rlhf_reward"]

    # Mean score 3, mean KL 0.5.
    assert reward(scores) == pytest.approx(3 - 0.1 * 0.5)
    assert reward(torch.full((3,), math.nan)) == pytest.approx(-0.1 * 0.5)


# Normalization.


def make(mode="none", critic_weight=1.0, **changes):
    settings = {"standardize_scores": mode, "score_clip": None, "missing_eos_penalty": 0.0}
    settings |= {"overlong_buffer": 0, "max_response_length": 10}
    return ScoreNormalization(SimpleNamespace(**settings | changes), critic_weight)


def normalize(normalization, *scores, function="normalize"):
    """Return normalized scores of four responses, the last of which has no eos."""
    ended = torch.tensor([True, True, True, False])
    lengths = torch.tensor([2, 8, 9, 10])
    return getattr(normalization, function)(torch.tensor(scores), ended, lengths).tolist()


@pytest.mark.parametrize("mode", ["first", "running"])
def test_equal_scores_are_kept_until_two_scores_differ(mode):
    value, normalization = 0.1, make(mode)
    assert normalize(normalization, *[value] * 4) == pytest.approx([value] * 4)
    found = normalize(normalization, 1.0, 5.0, 1.0, 5.0)
    # With the earlier ones.
    sample = torch.tensor([value] * 4 + [1.0, 5.0, 1.0, 5.0], dtype=torch.float64)
    expected = ((sample - sample.mean()) / sample.std(correction=0))[4:].tolist()
    assert found == pytest.approx(expected)


def test_mode_first_keeps_the_moments_of_the_first_step():
    normalization = make("first")
    # Mean 3, deviation 2.
    assert normalize(normalization, 1.0, 5.0, 1.0, 5.0) == [-1, 1, -1, 1]
    assert normalize(normalization, 3.0, 7.0, 11.0, -1.0) == [0, 2, 4, -2]
    assert normalization.normalize_values(torch.tensor([3.0, 6.0])).tolist() == [0, 1.5]


def test_mode_running_uses_the_moments_of_all_scores_so_far():
    normalization = make("running")
    # Mean 2, deviation 1.
    assert normalize(normalization, 1.0, 3.0, 1.0, 3.0) == [-1, 1, -1, 1]
    # With 5, 7, 5 and 7: mean 4, deviation sqrt(5).
    found = normalize(normalization, 5.0, 7.0, 5.0, 7.0)
    assert found == pytest.approx([1 / math.sqrt(5), 3 / math.sqrt(5)] * 2)
    # The critic was trained on those of the first step.
    assert normalization.normalize_values(torch.tensor([2.0, 5.0])).tolist() == [0, 3]
    # An evaluation leaves the normalization as it is.
    before = normalization.state_dict()
    assert normalize(normalization, *[4.0] * 4, function="normalized") == [0] * 4
    assert normalization.state_dict() == before


def test_the_penalty_is_subtracted_after_clipping_normalized_scores():
    normalization = make("first", score_clip=0.75, missing_eos_penalty=2.0)
    # Normalized: -1, 1, -1 and 1. The last response has no eos.
    assert normalize(normalization, 1.0, 5.0, 1.0, 5.0) == [-0.75, 0.75, -0.75, 0.75 - 2.0]
    # It does not count in the moments.
    assert normalization.moments == (4, 3.0, 16.0)


def test_the_penalty_of_long_responses_rises_over_the_buffer():
    normalization = make(missing_eos_penalty=3.0, overlong_buffer=3)
    # Lengths 2, 8 and 9 of 10; the last response has no eos.
    assert normalize(normalization, 0.0, 0.0, 0.0, 1.0) == pytest.approx([0, -1, -2, 1 - 3])


def test_a_critic_starts_on_the_scale_of_its_reward_models_weight():
    normalization = make("first", critic_weight=0.5)
    # Sums: mean 7.5, deviation 5.
    normalize(normalization, 2.5, 12.5, 2.5, 12.5)
    assert normalization.normalize_values(torch.tensor([15.0])).tolist() == [0]
    unscaled = make("first", critic_weight=None)
    normalize(unscaled, 2.5, 12.5, 2.5, 12.5)
    assert unscaled.normalize_values(torch.tensor([15.0])).tolist() == [15]
