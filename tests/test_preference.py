"""Losses and accuracies of preference pairs, against numbers checked by hand."""

import math

import pytest
import torch

from rlhf.preference import accuracy_and_ties, pairwise_loss


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
