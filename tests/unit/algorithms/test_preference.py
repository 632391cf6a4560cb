"""Losses and metrics of preference pairs, against numbers computed by hand."""

import math

import pytest
import torch

from snakechat.algorithms.preference import (
    PAIR_METRICS,
    calibration,
    divergent_positions,
    dpo_loss,
    held_out_metrics,
    implicit_rewards,
    metrics_by_dataset,
    pair_metric_sums,
    pairwise_loss,
    per_token_loss,
)


def test_loss_of_equal_scores_is_log_2():
    loss = pairwise_loss(torch.tensor([0.0, -7.5]), torch.tensor([0.0, -7.5]))
    assert loss.tolist() == pytest.approx([math.log(2)] * 2)


def test_loss_is_minus_log_sigmoid_of_the_difference():
    loss = pairwise_loss(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 3.0]))
    # Differences 2 and -2.
    expected = [math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))]
    assert loss.tolist() == pytest.approx(expected)


def test_loss_is_finite_at_any_difference():
    loss = pairwise_loss(torch.tensor([1000.0, -1000.0]), torch.tensor([0.0, 0.0]))
    assert loss.tolist() == [0.0, 1000.0]


def test_gradient_decreases_with_the_difference_of_the_scores():
    chosen = torch.tensor([0.0, 2.0], requires_grad=True)
    rejected = torch.tensor([0.0, 0.0], requires_grad=True)
    pairwise_loss(chosen, rejected).sum().backward()
    # d/dx -log sigmoid(x) = -sigmoid(-x): -1/2 at 0.
    expected = [-0.5, -1 / (1 + math.exp(2))]
    assert chosen.grad.tolist() == pytest.approx(expected)
    assert rejected.grad.tolist() == pytest.approx([-gradient for gradient in expected])


def test_implicit_rewards_are_beta_times_the_log_ratio():
    rewards = implicit_rewards(torch.tensor([-3.0, -7.0]), torch.tensor([-5.0, -6.0]), 0.1)
    assert rewards.tolist() == pytest.approx([0.2, -0.1])


def test_initial_dpo_loss_is_log_2_with_any_label_smoothing():
    start = torch.zeros(2)
    for label_smoothing in (0.0, 0.1):
        loss = dpo_loss(start, start, label_smoothing)
        assert loss.tolist() == pytest.approx([math.log(2)] * 2)


def test_dpo_loss_is_the_pairwise_loss_of_implicit_rewards():
    # Differences 2 and -2: log(1 + e^-2) and log(1 + e^2).
    correct, incorrect = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    chosen, rejected = torch.tensor([1.5, -1.0]), torch.tensor([-0.5, 1.0])
    assert dpo_loss(chosen, rejected, 0.0).tolist() == pytest.approx([correct, incorrect])
    smoothed = [0.9 * correct + 0.1 * incorrect, 0.9 * incorrect + 0.1 * correct]
    assert dpo_loss(chosen, rejected, 0.1).tolist() == pytest.approx(smoothed)


def test_label_smoothing_limits_the_difference():
    # The smoothed loss has its minimum where sigmoid(difference) = 0.9: at log 9.
    chosen = torch.tensor([1.0, math.log(9), 5.0], requires_grad=True)
    dpo_loss(chosen, torch.zeros(3), 0.1).sum().backward()
    assert chosen.grad[0] < 0 and chosen.grad[2] > 0
    assert chosen.grad[1].item() == pytest.approx(0, abs=1e-6)


# Per-token loss.


def divergence(chosen, rejected):
    """The mask of a pair as a string: x where it is true."""
    longest = max(len(chosen), len(rejected))
    # Padded with the last token, as pad_with_last does.
    rows = [ids + [ids[-1]] * (longest - len(ids)) for ids in (chosen, rejected)]
    lengths = torch.tensor([len(chosen), len(rejected)])
    [mask] = divergent_positions(torch.tensor(rows), lengths).tolist()
    return "".join("x" if value else "." for value in mask)


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        # From the start, from the middle, at the end.
        ([5, 6, 2], [7, 6, 2], "xxx"),
        ([5, 6, 7, 2], [5, 8, 7, 2], ".xxx"),
        ([5, 6, 7], [5, 6, 8], "..x"),
        # One longer than the other.
        ([5, 2], [5, 6, 7, 2], ".xxx"),
        ([5, 6, 7, 2], [5, 2], ".xxx"),
        ([5], [6, 6, 6], "xxx"),
        # One is a prefix of the other.
        ([5, 6], [5, 6, 6, 6], "..xx"),
        ([5, 6, 7], [5, 6], "..x"),
        # Equal.
        ([5, 6], [5, 6], ".."),
    ],
)
def test_positions_from_the_first_difference_to_the_end_of_the_longer_response(
    chosen, rejected, expected
):
    assert divergence(chosen, rejected) == expected


def test_each_pair_ends_at_its_own_longer_response():
    # Two pairs, chosen responses first. The first pair ends before the second one.
    tokens = torch.tensor([[5, 6, 6, 6], [5, 8, 8, 2], [5, 7, 7, 7], [5, 8, 9, 9]])
    mask = divergent_positions(tokens, torch.tensor([2, 4, 2, 3]))
    assert mask.int().tolist() == [[0, 1, 0, 0], [0, 0, 1, 1]]


def test_per_token_loss_is_the_mean_over_masked_positions():
    # Differences: 9, 2, -2; and 0, 9, 9.
    chosen = torch.tensor([[9.0, 3.0, 1.0], [4.0, 9.0, 9.0]], requires_grad=True)
    rejected = torch.tensor([[0.0, 1.0, 3.0], [4.0, 0.0, 0.0]])
    mask = torch.tensor([[False, True, True], [True, False, False]])
    losses = per_token_loss(chosen, rejected, mask)
    correct, incorrect = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    assert losses.tolist() == pytest.approx([(correct + incorrect) / 2, math.log(2)])
    losses.sum().backward()
    # -sigmoid(-difference) / number of masked positions.
    slopes = [[0, -1 / (1 + math.exp(2)) / 2, -1 / (1 + math.exp(-2)) / 2], [-0.5, 0, 0]]
    for gradients, expected in zip(chosen.grad.tolist(), slopes, strict=True):
        assert gradients == pytest.approx(expected)


# Metrics.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_metric_sums_over_pairs(dtype):
    # Correct, tie, incorrect, correct.
    chosen, rejected = torch.tensor([[2.0, 1, 0, 5], [1, 1, 3, 4.5]], dtype=dtype)
    sums = pair_metric_sums(torch.tensor([0.25, 0.5, 1.0, 0.25], dtype=dtype), chosen, rejected)
    assert sums.dtype == dtype
    assert dict(zip(PAIR_METRICS, sums.tolist(), strict=True)) == {
        "loss": 2.0,
        "accuracy": 2,
        "ties": 1,
        "margin": -1.5,
        "chosen_score": 8.0,
        "rejected_score": 9.5,
    }


def test_equal_scores_have_accuracy_0():
    metrics = held_out_metrics(torch.ones(3), torch.zeros(2, 3), torch.ones(2, 3))
    assert (metrics["accuracy"], metrics["ties"], metrics["margin"]) == (0, 1, 0)


def test_calibration_by_hand():
    # Confidences 0.6, 0.7, 0.9 and 0.95; the second pair is incorrect. Two bins, split at 0.75.
    odds = torch.tensor([6 / 4, 3 / 7, 9, 19], dtype=torch.float64)
    bins, error = calibration(odds.log(), 2)
    assert [each["pairs"] for each in bins] == [2, 2]
    assert [each["confidence"] for each in bins] == pytest.approx([0.65, 0.925])
    assert [each["accuracy"] for each in bins] == [0.5, 1.0]
    # Distances 0.15 and 0.075, of two pairs each.
    assert error == pytest.approx((2 * 0.15 + 2 * 0.075) / 4)


def test_empty_bins_are_omitted():
    # Ties, which are incorrect, are in the first bin; a confidence of 1 is in the last.
    bins, error = calibration(torch.tensor([0.0, 0.0, 0.0, 1000.0]), 15)
    assert bins == [
        {"pairs": 3, "confidence": 0.5, "accuracy": 0.0},
        {"pairs": 1, "confidence": 1.0, "accuracy": 1.0},
    ]
    assert error == pytest.approx(3 * 0.5 / 4)


def test_calibration_error_is_0_if_accuracy_equals_confidence():
    # Three of four correct at 0.75.
    margins = torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64) * math.log(3)
    assert calibration(margins, 15)[1] == pytest.approx(0)


def test_held_out_metrics():
    losses = torch.tensor([0.5, 1.5, 1.0, 1.0], dtype=torch.float64)
    scores = torch.tensor([[2.0, 0.0, 1.0, 1.0], [1.0, 3.0, 1.0, 0.5]], dtype=torch.float64)
    # The longer response is chosen once; two pairs have equal lengths.
    lengths = torch.tensor([[7, 5, 5, 4], [3, 9, 5, 4]])
    metrics = held_out_metrics(losses, scores, lengths)
    bins, error = calibration(scores[0] - scores[1], 15)
    assert metrics == {
        "pairs": 4,
        "loss": 1.0,
        "accuracy": 0.5,
        "ties": 0.25,
        "margin": -0.375,
        "chosen_score": 1.0,
        "rejected_score": 1.375,
        "calibration": bins,
        "calibration_error": error,
        "longer_wins_accuracy": 0.25,
        "equal_lengths": 0.5,
    }
    assert sum(each["pairs"] for each in bins) == 4


def test_several_datasets_additionally_have_metrics_each():
    losses = torch.tensor([0.5, 1.5, 1.0], dtype=torch.float64)
    scores = torch.tensor([[2.0, 0.0, 1.0], [1.0, 3.0, 0.5]], dtype=torch.float64)
    lengths = torch.tensor([[7, 5, 5], [3, 9, 5]])
    metrics = metrics_by_dataset(losses, scores, lengths, {"b": 1, "none": 0, "a": 2})
    together = held_out_metrics(losses, scores, lengths)
    assert metrics == together | {
        "by_dataset": {
            "b": held_out_metrics(losses[:1], scores[:, :1], lengths[:, :1]),
            "a": held_out_metrics(losses[1:], scores[:, 1:], lengths[:, 1:]),
        }
    }
    assert metrics["by_dataset"]["a"]["accuracy"] == 0.5
    assert metrics_by_dataset(losses, scores, lengths, {"b": 3}) == together
