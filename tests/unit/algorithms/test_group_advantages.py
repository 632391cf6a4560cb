"""Advantages of responses to the same prompt against numbers computed by hand and loops."""

import math

import pytest
import torch

from snakechat.algorithms.group_advantages import (
    grpo_advantages,
    overlong_penalties,
    rloo_advantages,
    uniform_groups,
)


def test_rloo_advantages_by_hand():
    # Two prompts, three responses each. 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2.
    scores = torch.tensor([[1.0, -1.0], [2.0, -1.0], [6.0, -1.0]])
    expected = torch.tensor([[-3.0, 0.0], [-1.5, 0.0], [4.5, 0.0]])
    torch.testing.assert_close(rloo_advantages(scores), expected)


def test_grpo_advantages_by_hand():
    # Mean 3, standard deviation 2 (A - 1: (4 + 0 + 4) / 2 = 4), at any scale of a prompt.
    scores = torch.tensor([[1.0, 100.0], [3.0, 300.0], [5.0, 500.0]])
    expected = torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]])
    torch.testing.assert_close(grpo_advantages(scores, True), expected, rtol=1e-4, atol=0)
    # Dr. GRPO subtracts the mean only.
    expected = torch.tensor([[-2.0, -200.0], [0.0, 0.0], [2.0, 200.0]])
    torch.testing.assert_close(grpo_advantages(scores, False), expected)
    # The constant added to the standard deviation: 2e-4 / (1e-4 * sqrt 2 + 1e-4), not sqrt 2.
    close = grpo_advantages(torch.tensor([[2e-4], [0.0]]), True)
    assert (close[0] - close[1]).item() == pytest.approx(2 / (math.sqrt(2) + 1), rel=1e-5)


def test_a_response_without_a_score_is_not_compared():
    # Mean 2 of the two others; a single score, and no score at all.
    scores = torch.tensor([[math.nan, math.nan, math.nan], [1.0, 5.0, math.nan]])
    scores = torch.cat([scores, torch.tensor([[3.0, math.nan, math.nan]])])
    expected = torch.tensor([[0.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(grpo_advantages(scores, False), expected)
    torch.testing.assert_close(rloo_advantages(scores), 2 * expected)
    scaled = grpo_advantages(scores, True)
    torch.testing.assert_close(scaled, expected / 2**0.5, rtol=1e-3, atol=0)
    assert uniform_groups(scores).tolist() == [False, True, True]


@pytest.mark.parametrize("score", [0.1, -37.7, 1e4 / 3])
def test_equal_scores_have_advantages_of_0(score):
    scores = torch.full((7, 2), score)
    assert not grpo_advantages(scores, True).any()
    assert not grpo_advantages(scores, False).any()
    assert not rloo_advantages(scores).any()


def test_groups_are_uniform_if_all_their_scores_are_equal():
    scores = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 1.0]])
    assert uniform_groups(scores).tolist() == [True, True, False]


def test_overlong_penalties_rise_over_the_buffer():
    # The buffer is from 6 to 10 tokens.
    lengths = torch.tensor([1, 6, 7, 9, 10])
    assert overlong_penalties(lengths, 10, 4).tolist() == [0, 0, 0.25, 0.75, 1]
    assert overlong_penalties(lengths, 10, 0).tolist() == [0, 0, 0, 0, 0]
