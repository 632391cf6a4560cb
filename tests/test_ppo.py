"""The mathematics of PPO, against numbers checked by hand, slow loops and autograd."""

import math

import pytest
import torch

from rlhf import ppo

CLIP = 0.2


def ragged_mask(lengths, width):
    return torch.tensor([[t < length for t in range(width)] for length in lengths])


def test_masked_mean_counts_masked_values_only():
    x = torch.tensor([[1.0, 2.0, 900.0], [3.0, 900.0, 900.0]])
    # (1 + 2 + 3) / 3
    assert ppo.masked_mean(x, ragged_mask([2, 1], 3)).item() == 2.0


def test_token_rewards_are_kl_at_each_token_and_the_score_at_the_last():
    rewards = ppo.token_rewards(
        scores=torch.tensor([1.0, -2.0]),
        logprobs=torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -1.0, 0.0]]),
        ref_logprobs=torch.tensor([[-1.5, -2.0, -2.5], [-2.0, -0.5, 0.0]]),
        response_mask=ragged_mask([3, 2], 3),
        kl_coef=0.1,
    )
    # Row 0: -.1 * .5, 0, -.1 * -.5 + 1. Row 1 ends at its second token: -.1 * 1, -.1 * -.5 - 2.
    expected = torch.tensor([[-0.05, 0.0, 1.05], [-0.1, -1.95, 0.0]])
    torch.testing.assert_close(rewards, expected)


def test_token_rewards_are_zero_outside_the_response():
    rewards = ppo.token_rewards(
        scores=torch.tensor([5.0]),
        logprobs=torch.tensor([[-1.0, -7.0, -7.0]]),
        ref_logprobs=torch.zeros(1, 3),
        response_mask=ragged_mask([1], 3),
        kl_coef=0.1,
    )
    torch.testing.assert_close(rewards, torch.tensor([[5.1, 0.0, 0.0]]))


def test_token_rewards_leave_the_scores_as_they_are():
    scores = torch.tensor([3.0])
    ppo.token_rewards(scores, torch.ones(1, 2), torch.zeros(1, 2), ragged_mask([2], 2), 0.5)
    assert scores.item() == 3.0


@pytest.mark.parametrize(
    ("gae_lambda", "expected"),
    [
        # Lambda 1: all rewards to come (1) less the value (.5), at each token.
        (1.0, [0.5, 0.5, 0.5]),
        # Lambda 0: the errors alone: 0 + .5 - .5, 0 + .5 - .5, 1 + 0 - .5.
        (0.0, [0.0, 0.0, 0.5]),
        # Lambda .5: the last error .5, halved at each token before it.
        (0.5, [0.125, 0.25, 0.5]),
    ],
)
def test_gae_of_one_reward_at_the_end(gae_lambda, expected):
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.full((1, 3), 0.5)
    advantages, returns = ppo.gae(rewards, values, ragged_mask([3], 3), 1.0, gae_lambda)
    torch.testing.assert_close(advantages, torch.tensor([expected]))
    torch.testing.assert_close(returns, torch.tensor([expected]) + 0.5)


def test_gae_discounts_by_gamma():
    rewards, values = torch.tensor([[0.0, 0.0, 8.0]]), torch.zeros(1, 3)
    advantages, _ = ppo.gae(rewards, values, ragged_mask([3], 3), 0.5, 1.0)
    torch.testing.assert_close(advantages, torch.tensor([[2.0, 4.0, 8.0]]))


def double_sum_gae(rewards, values, gamma, gae_lambda):
    """Schulman et al. 2016, eq. 16, of one whole response (lists), as it stands there."""
    length = len(rewards)
    state_values = [*values, 0.0]
    advantages = []
    for t in range(length):
        total = 0.0
        for step in range(length - t):
            delta = rewards[t + step] + gamma * state_values[t + step + 1] - state_values[t + step]
            total += (gamma * gae_lambda) ** step * delta
        advantages.append(total)
    return advantages


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
def test_gae_equals_the_double_sum_for_responses_of_all_lengths(gamma, gae_lambda):
    lengths, width = [1, 4, 7, 2, 6], 7
    mask = ragged_mask(lengths, width)
    random = torch.Generator().manual_seed(0)
    rewards = torch.randn(5, width, generator=random, dtype=torch.float64) * mask
    values = torch.randn(5, width, generator=random, dtype=torch.float64) * mask
    advantages, returns = ppo.gae(rewards, values, mask, gamma, gae_lambda)
    for row, length in enumerate(lengths):
        expected = double_sum_gae(
            rewards[row, :length].tolist(), values[row, :length].tolist(), gamma, gae_lambda
        )
        assert advantages[row, :length].tolist() == pytest.approx(expected)
        expected = torch.tensor(expected, dtype=torch.float64) + values[row, :length]
        torch.testing.assert_close(returns[row, :length], expected)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def test_returns_with_lambda_1_are_the_discounted_rewards_to_come():
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[7.0, -3.0, 0.2]])
    _, returns = ppo.gae(rewards, values, ragged_mask([3], 3), 0.5, 1.0)
    # 1 + .5 * (2 + .5 * 4), 2 + .5 * 4, 4: whatever the values are.
    torch.testing.assert_close(returns, torch.tensor([[3.0, 4.0, 4.0]]))


def test_whitening_by_hand():
    x = torch.tensor([[1.0, 3.0, 99.0]])
    whitened = ppo.whiten(x, ragged_mask([2], 3))
    # Mean 2, deviation 1.
    torch.testing.assert_close(whitened, torch.tensor([[-1.0, 1.0, 0.0]]))


def test_whitening_gives_mean_0_and_variance_1_over_all_masked_tokens():
    mask = ragged_mask([5, 1, 3], 5)
    x = (torch.randn(3, 5, generator=torch.Generator().manual_seed(0)) * 7 + 30) * mask
    whitened = ppo.whiten(x, mask)
    kept = whitened[mask]
    assert kept.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert kept.square().mean().item() == pytest.approx(1.0, abs=1e-5)
    assert not whitened[~mask].any()
    assert torch.equal(kept.argsort(), x[mask].argsort())


def test_whitening_equal_values_gives_zeros():
    assert not ppo.whiten(torch.full((2, 3), 4.0), ragged_mask([3, 3], 3)).any()


def loss_and_gradient(ratio, advantage):
    old = torch.tensor([-1.0])
    new = (old + math.log(ratio)).requires_grad_()
    loss = ppo.policy_loss(new, old, torch.tensor([advantage]), CLIP)
    loss.sum().backward()
    return loss.item(), new.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # The gradient of -A * ratio by log p is -A * ratio again.
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 2.0, -2.2, -2.2),
        (0.9, -2.0, 1.8, 1.8),
        # Likelier than allowed, and good: clipped to -2 * 1.2, nothing more to gain.
        (1.5, 2.0, -2.4, 0.0),
        # Likelier, but bad: not clipped, to be undone.
        (1.5, -2.0, 3.0, 3.0),
        # Less likely than allowed, and bad: clipped to 2 * .8.
        (0.5, -2.0, 1.6, 0.0),
        # Less likely, but good: not clipped.
        (0.5, 2.0, -1.0, -1.0),
    ],
)
def test_policy_loss_and_its_gradient(ratio, advantage, loss, gradient):
    assert loss_and_gradient(ratio, advantage) == (pytest.approx(loss), pytest.approx(gradient))


def test_policy_loss_at_ratio_1_has_the_gradient_of_the_plain_policy_gradient():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, generator=random, requires_grad=True)
    tokens = torch.tensor([0, 1, 2, 3, 4, 0])
    advantages = torch.randn(6, generator=random)
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None]).squeeze(1)
    ours = ppo.policy_loss(logprobs, logprobs.detach(), advantages, CLIP).sum()
    plain = -(advantages * logprobs).sum()
    (our_gradient,) = torch.autograd.grad(ours, logits, retain_graph=True)
    (plain_gradient,) = torch.autograd.grad(plain, logits)
    torch.testing.assert_close(our_gradient, plain_gradient)


def value_loss_and_gradient(value, old, target, clip_range):
    value = torch.tensor([value], requires_grad=True)
    loss = ppo.value_loss(value, torch.tensor([old]), torch.tensor([target]), clip_range)
    loss.sum().backward()
    return loss.item(), value.grad.item()


@pytest.mark.parametrize(
    ("value", "clip_range", "loss", "gradient"),
    [
        # Old value 0, return 1. Unclipped: (v - 1)^2 / 2, gradient v - 1.
        (3.0, 0.0, 2.0, 2.0),
        (0.5, 0.0, 0.125, -0.5),
        # Within the range: the same.
        (0.1, CLIP, 0.405, -0.9),
        # Moved towards the return by more than allowed: (.2 - 1)^2 / 2, nothing more to gain.
        (1.0, CLIP, 0.32, 0.0),
        # Moved away from it: (-1 - 1)^2 / 2 is larger than (-.2 - 1)^2 / 2, to be undone.
        (-1.0, CLIP, 2.0, -2.0),
    ],
)
def test_value_loss_and_its_gradient(value, clip_range, loss, gradient):
    found = value_loss_and_gradient(value, 0.0, 1.0, clip_range)
    assert found == (pytest.approx(loss), pytest.approx(gradient))


def test_ratio_statistics_before_an_update():
    logprobs = torch.tensor([-0.5, -3.0, -11.0])
    statistics = ppo.ratio_statistics(logprobs, logprobs.clone(), CLIP)
    assert statistics == {"ratio": 3.0, "approx_kl": 0.0, "clip_fraction": 0}


def test_ratio_statistics_are_sums_over_tokens():
    old = torch.tensor([-2.0, -2.0, -2.0, -2.0])
    new = old + torch.tensor([2.0, 1.0, 0.5, 1.1]).log()
    statistics = ppo.ratio_statistics(new, old, CLIP)
    assert statistics["ratio"] == pytest.approx(4.6)
    # Ratio - 1 - log ratio: (1 - log 2) + 0 + (-.5 + log 2) + (.1 - log 1.1).
    assert statistics["approx_kl"] == pytest.approx(0.6 - math.log(1.1), abs=1e-6)
    # 2 and .5 are outside .8 to 1.2.
    assert statistics["clip_fraction"] == 2


def test_explained_variance_is_1_for_right_values_and_0_for_constant_ones():
    returns = torch.tensor([[1.0, 2.0, 50.0], [4.0, 50.0, 50.0]])
    mask = ragged_mask([2, 1], 3)
    # What stands outside the mask must not count.
    right = torch.where(mask, returns, -9.0)
    constant = torch.where(mask, torch.tensor(1.7), -9.0)
    assert ppo.explained_variance(right, returns, mask) == pytest.approx(1.0)
    assert ppo.explained_variance(constant, returns, mask) == pytest.approx(0.0, abs=1e-6)


def test_explained_variance_is_negative_for_values_worse_than_a_constant():
    returns = torch.tensor([[1.0, 2.0, 4.0]])
    # returns - values = 2 * returns: four times the variance, 1 - 4.
    found = ppo.explained_variance(-returns, returns, ragged_mask([3], 3))
    assert found == pytest.approx(-3.0)
