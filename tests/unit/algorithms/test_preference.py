"""Losses and figures of preference pairs, against numbers checked by hand."""

import math

import pytest
import torch

from snakechat.algorithms.preference import (
    PAIR_FIGURES,
    calibration,
    dpo_loss,
    figures_by_dataset,
    held_out_figures,
    implicit_rewards,
    pair_sums,
    pairwise_loss,
    per_token_loss,
    since_parting,
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


def test_gradient_pushes_the_scores_apart_less_the_further_they_are():
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


def test_dpo_starts_at_log_2_whatever_the_smoothing():
    start = torch.zeros(2)
    for label_smoothing in (0.0, 0.1):
        loss = dpo_loss(start, start, label_smoothing)
        assert loss.tolist() == pytest.approx([math.log(2)] * 2)


def test_dpo_loss_is_that_of_a_reward_model_on_implicit_rewards():
    # Differences 2 and -2: log(1 + e^-2) and log(1 + e^2).
    right, wrong = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    chosen, rejected = torch.tensor([1.5, -1.0]), torch.tensor([-0.5, 1.0])
    assert dpo_loss(chosen, rejected, 0.0).tolist() == pytest.approx([right, wrong])
    smoothed = [0.9 * right + 0.1 * wrong, 0.9 * wrong + 0.1 * right]
    assert dpo_loss(chosen, rejected, 0.1).tolist() == pytest.approx(smoothed)


def test_smoothing_pulls_back_pairs_that_are_too_far_apart():
    # The smoothed loss is least where sigmoid(difference) = 0.9: at log 9.
    chosen = torch.tensor([1.0, math.log(9), 5.0], requires_grad=True)
    dpo_loss(chosen, torch.zeros(3), 0.1).sum().backward()
    assert chosen.grad[0] < 0 and chosen.grad[2] > 0
    assert chosen.grad[1].item() == pytest.approx(0, abs=1e-6)


# A score at each token.


def compared(chosen, rejected):
    """Places that are compared, as a string: x for a place that is."""
    longest = max(len(chosen), len(rejected))
    # The last token repeated, as snakechat.modeling.forward.padded does.
    rows = [ids + [ids[-1]] * (longest - len(ids)) for ids in (chosen, rejected)]
    lengths = torch.tensor([len(chosen), len(rejected)])
    [found] = since_parting(torch.tensor(rows), lengths).tolist()
    return "".join("x" if place else "." for place in found)


@pytest.mark.parametrize(
    ("chosen", "rejected", "places"),
    [
        # From the start, from the middle, at the end.
        ([5, 6, 2], [7, 6, 2], "xxx"),
        ([5, 6, 7, 2], [5, 8, 7, 2], ".xxx"),
        ([5, 6, 7], [5, 6, 8], "..x"),
        # One longer than the other, whichever it is.
        ([5, 2], [5, 6, 7, 2], ".xxx"),
        ([5, 6, 7, 2], [5, 2], ".xxx"),
        ([5], [6, 6, 6], "xxx"),
        # One the beginning of the other, with the same token going on.
        ([5, 6], [5, 6, 6, 6], "..xx"),
        ([5, 6, 7], [5, 6], "..x"),
        # Nowhere.
        ([5, 6], [5, 6], ".."),
    ],
)
def test_responses_are_compared_from_where_they_part_to_the_end_of_the_longer_one(
    chosen, rejected, places
):
    assert compared(chosen, rejected) == places


def test_pairs_are_compared_each_to_its_own_end():
    # Two pairs: chosen responses first. The first pair ends before the second one does.
    tokens = torch.tensor([[5, 6, 6, 6], [5, 8, 8, 2], [5, 7, 7, 7], [5, 8, 9, 9]])
    found = since_parting(tokens, torch.tensor([2, 4, 2, 3]))
    assert found.int().tolist() == [[0, 1, 0, 0], [0, 0, 1, 1]]


def test_per_token_loss_is_the_mean_of_the_places_that_are_compared():
    # Differences at the places: 9, 2, -2; and 0, 9, 9.
    chosen = torch.tensor([[9.0, 3.0, 1.0], [4.0, 9.0, 9.0]], requires_grad=True)
    rejected = torch.tensor([[0.0, 1.0, 3.0], [4.0, 0.0, 0.0]])
    places = torch.tensor([[False, True, True], [True, False, False]])
    losses = per_token_loss(chosen, rejected, places)
    right, wrong = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    assert losses.tolist() == pytest.approx([(right + wrong) / 2, math.log(2)])
    losses.sum().backward()
    # -sigmoid(-difference), over the number of places.
    slopes = [[0, -1 / (1 + math.exp(2)) / 2, -1 / (1 + math.exp(-2)) / 2], [-0.5, 0, 0]]
    for found, expected in zip(chosen.grad.tolist(), slopes, strict=True):
        assert found == pytest.approx(expected)


# Figures.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_over_pairs(dtype):
    # Right, tie, wrong, right.
    chosen, rejected = torch.tensor([[2.0, 1, 0, 5], [1, 1, 3, 4.5]], dtype=dtype)
    sums = pair_sums(torch.tensor([0.25, 0.5, 1.0, 0.25], dtype=dtype), chosen, rejected)
    assert sums.dtype == dtype
    found = dict(zip(PAIR_FIGURES, sums.tolist(), strict=True))
    assert found == {
        "loss": 2.0,
        "accuracy": 2,
        "ties": 1,
        "margin": -1.5,
        "chosen_score": 8.0,
        "rejected_score": 9.5,
    }


def test_a_model_that_gives_one_score_to_all_is_never_right():
    figures = held_out_figures(torch.ones(3), torch.zeros(2, 3), torch.ones(2, 3))
    assert (figures["accuracy"], figures["ties"], figures["margin"]) == (0, 1, 0)


def test_calibration_by_hand():
    # Sure to 0.6, 0.7, 0.9 and 0.95; the second is wrong. Two bins, which meet at 0.75.
    odds = torch.tensor([6 / 4, 3 / 7, 9, 19], dtype=torch.float64)
    bins, error = calibration(odds.log(), 2)
    assert [found["pairs"] for found in bins] == [2, 2]
    assert [found["confidence"] for found in bins] == pytest.approx([0.65, 0.925])
    assert [found["accuracy"] for found in bins] == [0.5, 1.0]
    # Distances 0.15 and 0.075, of two pairs each.
    assert error == pytest.approx((2 * 0.15 + 2 * 0.075) / 4)


def test_bins_without_pairs_are_left_out():
    # Ties, which are no success, are in the first bin, and what is quite sure in the last.
    bins, error = calibration(torch.tensor([0.0, 0.0, 0.0, 1000.0]), 15)
    assert bins == [
        {"pairs": 3, "confidence": 0.5, "accuracy": 0.0},
        {"pairs": 1, "confidence": 1.0, "accuracy": 1.0},
    ]
    assert error == pytest.approx(3 * 0.5 / 4)


def test_a_model_that_is_as_often_right_as_it_is_sure_has_no_error():
    # Three of four right at 0.75.
    margins = torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64) * math.log(3)
    assert calibration(margins, 15)[1] == pytest.approx(0)


def test_figures_of_held_out_pairs():
    losses = torch.tensor([0.5, 1.5, 1.0, 1.0], dtype=torch.float64)
    scores = torch.tensor([[2.0, 0.0, 1.0, 1.0], [1.0, 3.0, 1.0, 0.5]], dtype=torch.float64)
    # The longer response is chosen once, and twice both are as long.
    lengths = torch.tensor([[7, 5, 5, 4], [3, 9, 5, 4]])
    figures = held_out_figures(losses, scores, lengths)
    bins, error = calibration(scores[0] - scores[1], 15)
    assert figures == {
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
    assert sum(found["pairs"] for found in bins) == 4


def test_each_of_several_datasets_has_its_own_figures():
    losses = torch.tensor([0.5, 1.5, 1.0], dtype=torch.float64)
    scores = torch.tensor([[2.0, 0.0, 1.0], [1.0, 3.0, 0.5]], dtype=torch.float64)
    lengths = torch.tensor([[7, 5, 5], [3, 9, 5]])
    figures = figures_by_dataset(losses, scores, lengths, {"b": 1, "none": 0, "a": 2})
    together = held_out_figures(losses, scores, lengths)
    assert figures == together | {
        "of": {
            "b": held_out_figures(losses[:1], scores[:, :1], lengths[:, :1]),
            "a": held_out_figures(losses[1:], scores[:, 1:], lengths[:, 1:]),
        }
    }
    assert figures["of"]["a"]["accuracy"] == 0.5
    assert figures_by_dataset(losses, scores, lengths, {"b": 3}) == together
