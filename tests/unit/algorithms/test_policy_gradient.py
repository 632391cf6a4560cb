"""Rewards, advantages, losses and statistics of PPO against numbers computed by hand."""

import math

import pytest
import torch

from snakechat.algorithms import policy_gradient as pg

CLIP, CLIP_HIGH = 0.2, 0.3


def ragged_mask(lengths, width):
    return torch.tensor([[t < length for t in range(width)] for length in lengths])


def test_gae_by_hand():
    # The second response ends after a token; what stands outside must not count.
    mask, rewards = ragged_mask([2, 1], 2), torch.tensor([[1.0, 2.0], [3.0, 99.0]])
    values = torch.tensor([[0.5, 1.0], [2.0, 99.0]])
    advantages, returns = pg.gae(rewards, values, mask, gamma=0.5, gae_lambda=0.5)
    # Deltas 1 + .5 * 1 - .5 and 2 - 1; 1 + .25 * 1. Then 3 - 2.
    assert advantages.tolist() == [[1.25, 1.0], [1.0, 0.0]]
    assert returns.tolist() == [[1.75, 2.0], [3.0, 0.0]]


def test_whitening_by_hand():
    x = torch.tensor([[1.0, 3.0, 99.0]])
    whitened = pg.whiten(x, ragged_mask([2], 3))
    # Mean 2, standard deviation 1.
    torch.testing.assert_close(whitened, torch.tensor([[-1.0, 1.0, 0.0]]))
    # Equal values give zeros.
    assert not pg.whiten(torch.full((2, 3), 4.0), ragged_mask([3, 3], 3)).any()


def loss_and_gradient(ratio, advantage):
    log_ratio = torch.tensor([ratio]).log().requires_grad_()
    loss = pg.policy_loss(log_ratio, torch.tensor([advantage]), CLIP, CLIP_HIGH)
    loss.sum().backward()
    return loss.item(), log_ratio.grad.item()


@pytest.mark.parametrize(
    ("advantage", "low", "high"),
    # Of the ratios 0.5, 0.9, 1.25 and 1.5, the range .8 to 1.3 clips .5 and 1.5: one where the
    # advantage is positive, the other where it is negative.
    [(2.0, 0, 1), (-2.0, 1, 0), (0.0, 0, 0)],
)
def test_ratio_statistics_are_sums_and_count_the_tokens_without_a_gradient(advantage, low, high):
    ratios = [0.5, 0.9, 1.25, 1.5]
    log_ratios, advantages = torch.tensor(ratios).log(), torch.full((4,), advantage)
    found = pg.ratio_statistics(log_ratios, advantages, CLIP, CLIP_HIGH)
    approxkl = sum(ratio - 1 - math.log(ratio) for ratio in ratios)
    assert [*map(float, found.values())] == pytest.approx([sum(ratios), approxkl, low, high])
    gradients = [loss_and_gradient(ratio, advantage)[1] for ratio in ratios]
    assert advantage == 0 or gradients.count(0.0) == low + high


def test_explained_variance_is_1_for_exact_values_and_0_for_constant_ones():
    returns, mask = torch.tensor([[1.0, 2.0, 50.0], [4.0, 50.0, 50.0]]), ragged_mask([2, 1], 3)
    # What stands outside the mask must not count.
    for inside, expected in ((returns, 1), (torch.tensor(1.7), 0)):
        found = pg.explained_variance(torch.where(mask, inside, -9.0), returns, mask)
        assert found == pytest.approx(expected, abs=1e-6)
    # Constant returns have no variance to explain.
    equal = torch.full((2, 3), 0.1)
    assert pg.explained_variance(equal, equal, mask) == 1.0


def test_a_response_without_a_score_is_not_compared():
    # Mean 2 of the two others; a single score, and no score at all.
    nan = math.nan
    scores = torch.tensor([[nan, nan, nan], [1.0, 5.0, nan], [3.0, nan, nan]])
    expected = torch.tensor([[0.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(pg.grpo_advantages(scores, False), expected)
    torch.testing.assert_close(pg.rloo_advantages(scores), 2 * expected)
    scaled = pg.grpo_advantages(scores, True)
    torch.testing.assert_close(scaled, expected / 2**0.5, rtol=1e-3, atol=0)
    assert pg.uniform_groups(scores).tolist() == [False, True, True]
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2.
    assert pg.rloo_advantages(torch.tensor([[1.0], [2.0], [6.0]])).T.tolist() == [[-3, -1.5, 4.5]]
    # The constant added to the standard deviation: 2e-4 / (1e-4 * sqrt 2 + 1e-4), not sqrt 2.
    close = pg.grpo_advantages(torch.tensor([[2e-4], [0.0]]), True)
    assert (close[0] - close[1]).item() == pytest.approx(2 / (math.sqrt(2) + 1), rel=1e-5)


def test_kl_penalty_is_never_negative_however_small_the_difference():
    sizes = torch.logspace(-12, 1.5, 10_001)
    penalties = [pg.kl_penalty(torch.zeros(10_001), each, "k3") for each in (sizes, -sizes)]
    assert all((penalty >= 0).all() for penalty in penalties)
    # Half the square.
    small = pg.kl_penalty(torch.tensor([0.0]), torch.tensor([1e-4]), "k3")
    assert small.item() == pytest.approx(5e-9, rel=1e-3)


def test_added_moments_of_batches_are_those_of_all_values():
    # Mean 3; 4 + 1 + 0 + 9.
    assert pg.added_moments((0, 0.0, 0.0), torch.tensor([[1.0, 2.0], [3.0, 6.0]])) == (4, 3.0, 14.0)
    # Far from 0, where the sum of squares minus the square of the sum loses all digits.
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values += 1e8
    running = (0, 0.0, 0.0)
    for batch in values.split([1, 7, 500, 492]):
        running = pg.added_moments(running, batch)
    count, mean, squares = running
    assert count == 1000
    assert mean == pytest.approx(values.mean().item(), rel=1e-14)
    assert squares / 999 == pytest.approx(values.var().item(), rel=1e-6)
