"""Losses and accuracies of preference pairs, against numbers checked by hand."""

import math

import pytest
import torch

from rlhf.preference import accuracy_and_ties, dpo_loss, implicit_rewards, pairwise_loss


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


def test_ties_are_no_success_and_counted_apart():
    chosen, rejected = torch.tensor([2.0, 1.0, 0.0, 5.0]), torch.tensor([1.0, 1.0, 3.0, 4.9])
    # Right, tie, wrong, right.
    assert accuracy_and_ties(chosen, rejected) == (0.5, 0.25)


def test_a_model_that_gives_one_score_to_all_is_never_right():
    assert accuracy_and_ties(torch.zeros(3), torch.zeros(3)) == (0.0, 1.0)


def test_accuracy_of_whole_numbers():
    assert accuracy_and_ties(torch.tensor([3, 4]), torch.tensor([2, 4])) == (0.5, 0.5)


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
