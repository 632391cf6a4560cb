"""The equations of policy gradients against numbers computed by hand, loops and autograd."""

import itertools
import math
from functools import partial

import pytest
import torch

from snakechat.algorithms import ppo
from snakechat.algorithms.group_advantages import grpo_advantages, rloo_advantages

CLIP, CLIP_HIGH = 0.2, 0.3


def ragged_mask(lengths, width):
    return torch.tensor([[t < length for t in range(width)] for length in lengths])


def test_masked_mean_counts_masked_values_only():
    x = torch.tensor([[1.0, 2.0, 900.0], [3.0, 900.0, 900.0]])
    # (1 + 2 + 3) / 3
    assert ppo.masked_mean(x, ragged_mask([2, 1], 3)).item() == 2.0


def test_token_rewards_are_kl_at_each_token_and_the_score_at_the_last():
    rewards = ppo.token_rewards(
        scores=torch.tensor([1.0, -2.0]),
        penalties=torch.tensor([[0.5, 0.0, -0.5], [1.0, -0.5, 0.0]]),
        response_mask=ragged_mask([3, 2], 3),
        kl_coef=0.1,
    )
    # Row 0: -.1 * .5, 0, -.1 * -.5 + 1. Row 1 ends at its second token: -.1 * 1, -.1 * -.5 - 2.
    expected = torch.tensor([[-0.05, 0.0, 1.05], [-0.1, -1.95, 0.0]])
    torch.testing.assert_close(rewards, expected)


def test_token_rewards_are_zero_outside_the_response():
    rewards = ppo.token_rewards(
        scores=torch.tensor([5.0]),
        penalties=torch.tensor([[-1.0, -7.0, -7.0]]),
        response_mask=ragged_mask([1], 3),
        kl_coef=0.1,
    )
    torch.testing.assert_close(rewards, torch.tensor([[5.1, 0.0, 0.0]]))


def test_token_rewards_do_not_change_the_scores():
    scores = torch.tensor([3.0])
    ppo.token_rewards(scores, torch.ones(1, 2), ragged_mask([2], 2), 0.5)
    assert scores.item() == 3.0


@pytest.mark.parametrize(
    ("gae_lambda", "expected"),
    [
        # Lambda 1: the sum of future rewards (1) minus the value (.5), at each token.
        (1.0, [0.5, 0.5, 0.5]),
        # Lambda 0: the TD errors: 0 + .5 - .5, 0 + .5 - .5, 1 + 0 - .5.
        (0.0, [0.0, 0.0, 0.5]),
        # Lambda .5: the last TD error .5, halved at each token before it.
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
    """Schulman et al. 2016, eq. 16, of one response (lists), as the double sum of the paper."""
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


def test_gae_ignores_values_after_the_end():
    mask = ragged_mask([2, 3], 3)
    rewards, values = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 3.0]]), torch.ones(2, 3)
    expected = ppo.gae(rewards, values * mask, mask, 0.9, 0.5)
    after_end = torch.where(mask, 0.0, 77.0)
    actual = ppo.gae(rewards + after_end, values + after_end, mask, 0.9, 0.5)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_gae_of_single_tokens_is_reward_minus_value():
    advantages, returns = ppo.gae(
        torch.tensor([[2.0], [0.0]]), torch.tensor([[0.5], [1.0]]), ragged_mask([1, 1], 1), 0.9, 0.9
    )
    assert advantages.tolist() == [[1.5], [-1.0]]
    assert returns.tolist() == [[2.0], [0.0]]


def test_returns_with_lambda_1_are_discounted_future_rewards():
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[7.0, -3.0, 0.2]])
    _, returns = ppo.gae(rewards, values, ragged_mask([3], 3), 0.5, 1.0)
    # 1 + .5 * (2 + .5 * 4), 2 + .5 * 4, 4, independent of the values.
    torch.testing.assert_close(returns, torch.tensor([[3.0, 4.0, 4.0]]))


def test_whitening_by_hand():
    x = torch.tensor([[1.0, 3.0, 99.0]])
    whitened = ppo.whiten(x, ragged_mask([2], 3))
    # Mean 2, standard deviation 1.
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
    log_ratio = torch.tensor([ratio]).log().requires_grad_()
    loss = ppo.policy_loss(log_ratio, torch.tensor([advantage]), CLIP, CLIP_HIGH)
    loss.sum().backward()
    return loss.item(), log_ratio.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # The gradient of -A * ratio by log p is -A * ratio again.
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 2.0, -2.2, -2.2),
        (0.9, -2.0, 1.8, 1.8),
        (1.25, 2.0, -2.5, -2.5),
        # Likelier than allowed, and good: clipped to -2 * 1.3, nothing more to gain.
        (1.5, 2.0, -2.6, 0.0),
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
    ours = ppo.policy_loss(logprobs - logprobs.detach(), advantages, CLIP, CLIP).sum()
    plain = -(advantages * logprobs).sum()
    (our_gradient,) = torch.autograd.grad(ours, logits, retain_graph=True)
    (plain_gradient,) = torch.autograd.grad(plain, logits)
    torch.testing.assert_close(our_gradient, plain_gradient)


def test_sequence_log_ratios_are_means_over_the_responses():
    # Responses of 3, 1 and 2 tokens.
    log_ratios = torch.tensor([0.1, 0.2, 0.6, -1.0, 0.5, -0.1], requires_grad=True)
    found = ppo.sequence_log_ratios(log_ratios, torch.tensor([3, 1, 2]))
    torch.testing.assert_close(found, torch.tensor([0.3, 0.3, 0.3, -1.0, 0.2, 0.2]))
    # Eq. 10 of Zheng et al. 2025: with equal weights, each token of a response has the gradient
    # ratio / length.
    (
        -ppo.policy_loss(found, torch.ones(6), 9.0, 9.0) / torch.tensor([3, 3, 3, 1, 2, 2])
    ).sum().backward()
    expected = [math.exp(0.3) / 3] * 3 + [math.exp(-1.0)] + [math.exp(0.2) / 2] * 2
    assert log_ratios.grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # Three responses of 4, 1 and 5 tokens.
        ("token_mean", [1, 1, 1]),
        # 10 tokens, divided by 3 responses and their lengths; and by 3 responses of 8 tokens.
        ("sequence_mean", [10 / 12, 10 / 3, 10 / 15]),
        ("max_length", [10 / 24, 10 / 24, 10 / 24]),
    ],
)
def test_token_weights_by_hand(aggregation, expected):
    weights = ppo.token_weights(torch.tensor([4, 1, 5]), aggregation, max_length=8)
    assert weights.tolist() == pytest.approx(expected)


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
    advantages = torch.tensor([1.0, -1.0, 0.0])
    found = ppo.ratio_statistics(torch.zeros(3), advantages, CLIP, CLIP_HIGH)
    assert found == {"ratio": 3.0, "approxkl": 0.0, "clipfrac_low": 0, "clipfrac_high": 0}


def test_ratio_statistics_are_sums_over_tokens():
    log_ratios = torch.tensor([2.0, 1.0, 0.5, 1.1]).log()
    found = ppo.ratio_statistics(log_ratios, torch.ones(4), CLIP, CLIP_HIGH)
    assert found["ratio"].item() == pytest.approx(4.6)
    # Ratio - 1 - log ratio: (1 - log 2) + 0 + (-.5 + log 2) + (.1 - log 1.1).
    assert found["approxkl"].item() == pytest.approx(0.6 - math.log(1.1), abs=1e-6)


@pytest.mark.parametrize(
    ("advantage", "low", "high"),
    # Of the ratios 0.5, 0.9, 1.25 and 1.5, the range .8 to 1.3 clips .5 and 1.5: one where the
    # advantage is positive, the other where it is negative.
    [(2.0, 0, 1), (-2.0, 1, 0), (0.0, 0, 0)],
)
def test_ratio_statistics_count_the_tokens_without_a_gradient(advantage, low, high):
    log_ratios = torch.tensor([0.5, 0.9, 1.25, 1.5]).log()
    found = ppo.ratio_statistics(log_ratios, torch.full((4,), advantage), CLIP, CLIP_HIGH)
    assert (found["clipfrac_low"], found["clipfrac_high"]) == (low, high)
    gradients = [loss_and_gradient(ratio.item(), advantage)[1] for ratio in log_ratios.exp()]
    assert advantage == 0 or gradients.count(0.0) == low + high


def test_approxkl_of_small_steps_is_half_their_squares():
    found = ppo.ratio_statistics(torch.full((1000,), 1e-4), torch.zeros(1000), CLIP, CLIP)
    assert found["approxkl"].item() == pytest.approx(1000 * 1e-4**2 / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("clip_range", "clipped"),
    # Values moved by 0, .1, -.3 and .5.
    [(0.2, 2), (0.4, 1), (0.05, 3), (0.0, 0)],
)
def test_value_statistics_count_what_value_loss_clips(clip_range, clipped):
    old = torch.tensor([1.0, 1.0, 1.0, 1.0])
    new = old + torch.tensor([0.0, 0.1, -0.3, 0.5])
    assert ppo.value_statistics(new, old, clip_range) == {"clipfrac": clipped}


def test_statistics_can_be_stacked_and_hold_no_graph():
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    old = torch.tensor([-1.0, -1.0])
    by_ratio = ppo.ratio_statistics(new - old, torch.ones(2), CLIP, CLIP)
    by_value = ppo.value_statistics(new, old, CLIP)
    for value in (*by_ratio.values(), *by_value.values()):
        assert value.shape == () and value.dtype == torch.float32 and not value.requires_grad


def test_explained_variance_is_1_for_exact_values_and_0_for_constant_ones():
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


def test_explained_variance_of_constant_returns_is_finite():
    mask = ragged_mask([2, 1], 2)
    returns = torch.full((2, 2), 0.1)
    assert ppo.explained_variance(returns, returns, mask) == 1.0
    worse = ppo.explained_variance(torch.tensor([[5.0, -5.0], [9.0, 0.0]]), returns, mask)
    assert math.isfinite(worse) and worse < 0
    one_token = ppo.explained_variance(torch.tensor([[3.0]]), torch.tensor([[1.0]]), mask[1:, :1])
    assert one_token == 1.0


# --- KL, its coefficient, running moments ---------------------------------------------------


def test_kl_penalty_by_hand():
    # Reference twice as likely: 2 - 1 - log 2; half as likely: 1/2 - 1 + log 2; as likely: 0.
    ref = torch.tensor([[2.0, 0.5, 1.0]]).log() - 3.0
    log2 = math.log(2)
    for estimator, expected in (
        ("k1", [-log2, log2, 0.0]),
        ("k2", [log2**2 / 2, log2**2 / 2, 0.0]),
        ("k3", [1 - log2, log2 - 0.5, 0.0]),
    ):
        found = ppo.kl_penalty(torch.full((1, 3), -3.0), ref, estimator)
        torch.testing.assert_close(found, torch.tensor([expected]))


def test_kl_penalty_is_never_negative_however_small_the_difference():
    sizes = torch.logspace(-12, 1.5, 10_001)
    for difference in (sizes, -sizes):
        penalty = ppo.kl_penalty(torch.zeros_like(sizes), difference, "k3")
        assert (penalty >= 0).all()
    # Half the square.
    small = ppo.kl_penalty(torch.tensor([0.0]), torch.tensor([1e-4]), "k3")
    assert small.item() == pytest.approx(5e-9, rel=1e-3)


def vocabulary(seed, size=5):
    """Logits of a policy that learns and log-probabilities of another one, each of one token."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=random, dtype=torch.float64, requires_grad=True)
    other = torch.randn(size, generator=random, dtype=torch.float64).log_softmax(0)
    return logits, other


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("seed", range(3))
def test_the_mean_of_kl_penalty_is_the_kl(seed, estimator):
    logits, ref_logprobs = vocabulary(seed)
    logprobs = logits.log_softmax(0)
    exact = (logprobs.exp() * (logprobs - ref_logprobs)).sum()
    estimate = (logprobs.exp() * ppo.kl_penalty(logprobs, ref_logprobs, estimator)).sum()
    torch.testing.assert_close(estimate, exact)


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_gradient_of_kl_penalty_is_that_of_a_kl(seed):
    logits, ref_logprobs = vocabulary(seed)
    logprobs = logits.log_softmax(0)
    sampled = logprobs.exp().detach()
    kl = gradient((logprobs.exp() * (logprobs - ref_logprobs)).sum(), logits)
    # KL(ref || policy): by logits, policy - ref.
    reverse_kl = sampled - ref_logprobs.exp()
    for estimator, expected in (("k1", torch.zeros(5)), ("k2", kl), ("k3", reverse_kl)):
        penalty = (sampled * ppo.kl_penalty(logprobs, ref_logprobs, estimator)).sum()
        torch.testing.assert_close(gradient(penalty, logits), expected.double())


def gradient(loss, *by):
    found = torch.autograd.grad(loss, by, retain_graph=True)
    return found[0] if len(by) == 1 else found


@pytest.mark.parametrize(
    ("kl", "kl_coef"),
    [
        # Target 6, 512 rollouts, horizon 5,120: a tenth of the error, which ends at 20 %.
        (6.0, 0.05),
        (6.6, 0.05 * 1.01),
        (5.4, 0.05 * 0.99),
        (60.0, 0.05 * 1.02),
        (0.0, 0.05 * 0.98),
        (-3.0, 0.05 * 0.98),
    ],
)
def test_kl_coef_increases_with_the_kl(kl, kl_coef):
    assert ppo.adapted_kl_coef(0.05, kl, 6.0, 5120, 512) == pytest.approx(kl_coef)


def test_kl_coef_changes_by_a_fifth_at_most_however_short_the_horizon():
    # Without the limit, six times the horizon would subtract 120 %.
    assert ppo.adapted_kl_coef(0.05, 0.0, 6.0, 100, 600) == pytest.approx(0.04)


def test_kl_coef_moves_the_kl_to_its_target():
    # A policy whose KL is 2 / kl_coef: 6 nats at 1/3.
    kl_coef = 0.05
    for _ in range(200):
        kl_coef = ppo.adapted_kl_coef(kl_coef, 2 / kl_coef, 6.0, 1000, 500)
    assert kl_coef == pytest.approx(1 / 3, rel=1e-6)


def test_moments_by_hand():
    # Mean 3; 4 + 1 + 0 + 9.
    assert ppo.moments(torch.tensor([[1.0, 2.0], [3.0, 6.0]])) == (4, 3.0, 14.0)
    assert ppo.moments(torch.tensor([5.0])) == (1, 5.0, 0.0)
    # More digits than fp32 has.
    found = ppo.moments(torch.tensor([1e8, 1.0]))
    assert found == pytest.approx((2, 50_000_000.5, 2 * 49_999_999.5**2), rel=1e-12)


def test_merged_moments_by_hand():
    # 1, 3 and 8, 8, 8, 8: mean 36 / 6; 2 + 0 + (8 - 2)^2 * 2 * 4 / 6.
    first, second = ppo.moments(torch.tensor([1.0, 3.0])), ppo.moments(torch.full((4,), 8.0))
    assert ppo.merged_moments(first, second) == pytest.approx((6, 6.0, 50.0))
    assert ppo.merged_moments(second, first) == pytest.approx((6, 6.0, 50.0))


def test_merged_moments_of_batches_are_those_of_all_values():
    # Far from 0, where the sum of squares minus the square of the sum loses all digits.
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values += 1e8
    running = (0, 0.0, 0.0)
    for batch in values.split([1, 7, 500, 492]):
        running = ppo.merged_moments(running, ppo.moments(batch))
    count, mean, squares = running
    assert count == 1000
    assert mean == pytest.approx(values.mean().item(), rel=1e-14)
    assert squares / 999 == pytest.approx(values.var().item(), rel=1e-6)


# Importance weights.


def test_importance_weights_by_hand():
    sampler = torch.full((1, 4), -2.0)
    policy = sampler + torch.tensor([[0.5, 1.0, 2.0, 3.0]]).log()
    expected = torch.tensor([[0.5, 1.0, 2.0, 2.0]])
    torch.testing.assert_close(ppo.importance_weights(policy, sampler, 2.0), expected)


def test_importance_weights_are_finite_for_tokens_of_sampler_probability_0():
    weights = ppo.importance_weights(torch.tensor([-1.0]), torch.tensor([-1000.0]), 2.0)
    assert weights.item() == 2.0


@pytest.mark.parametrize("cap", [100.0, 1.5])
def test_importance_weights_correct_the_sampler_below_the_cap(cap):
    logits, sampler_logprobs = vocabulary(0)
    rewards = torch.tensor([3.0, -1.0, 0.5, 2.0, 1.0], dtype=torch.float64)
    logprobs = logits.log_softmax(0)
    weights = ppo.importance_weights(logprobs, sampler_logprobs, cap)
    assert not weights.requires_grad
    # The expectation over the tokens of the sampler.
    sampled = sampler_logprobs.exp()
    estimate = gradient((sampled * weights * rewards * logprobs).sum(), logits)
    # Expected gradient: p * (reward - mean reward), with cap * sampler instead of p if capped.
    policy = logprobs.exp().detach()
    mean = (policy * rewards).sum()
    exact = policy * (rewards - mean)
    if cap == 100.0:
        assert (policy / sampled).max() < cap
        torch.testing.assert_close(estimate, exact)
    else:
        counted = torch.minimum(policy, cap * sampled)
        assert (counted < policy).any()
        biased = counted * rewards - policy * (counted * rewards).sum()
        torch.testing.assert_close(estimate, biased)
        assert (biased - exact).abs().max() > 0.1


# Gradients of complete losses with respect to the logits.

# A response of two tokens from a vocabulary of two: token 0 (.5 against .5), then 1 (.4 and .6).
TOKENS = torch.tensor([0, 1])
PROBABILITIES = torch.tensor([[0.5, 0.5], [0.4, 0.6]], dtype=torch.float64)
# Gradient of a log-probability with respect to the logits: one-hot minus the probabilities.
SLOPES = torch.tensor([[0.5, -0.5], [-0.4, 0.4]], dtype=torch.float64)


def policy_of_two_tokens():
    """Logits [2, 2], and the log-probabilities [1, 2] of the two tokens."""
    logits = PROBABILITIES.log().requires_grad_()
    return logits, logits.log_softmax(dim=1).gather(1, TOKENS[:, None]).T


@pytest.mark.parametrize(
    ("score", "advantages", "kept"),
    [
        # KL coefficient .1, reference .25 and .6: rewards -.1 * log 2 and the score. Values .5 and
        # 1, gamma 1, lambda .5: errors -.1 * log 2 + 1 - .5 and score - 1.
        (3.0, [-0.1 * math.log(2) + 0.5 + 0.5 * 2, 2.0], [1.0, 0.0]),
        (-1.0, [-0.1 * math.log(2) + 0.5 - 0.5 * 2, -2.0], [1.0, 1.0]),
    ],
)
def test_gradient_of_the_whole_ppo_loss(score, advantages, kept):
    logits, logprobs = policy_of_two_tokens()
    # Ratios 1.1, and 1.5: clipped where the advantage is positive.
    ratios = torch.tensor([[1.1, 1.5]], dtype=torch.float64)
    old_logprobs = logprobs.detach() - ratios.log()
    ref_logprobs = old_logprobs - torch.tensor([[2.0, 1.0]], dtype=torch.float64).log()
    old_values = torch.tensor([[0.5, 1.0]], dtype=torch.float64)
    values = torch.tensor([[0.6, 0.0]], dtype=torch.float64, requires_grad=True)
    mask = ragged_mask([2], 2)

    scores = torch.tensor([score], dtype=torch.float64)
    rewards = ppo.token_rewards(scores, old_logprobs - ref_logprobs, mask, 0.1)
    found, returns = ppo.gae(rewards, old_values, mask, 1.0, 0.5)
    loss = ppo.masked_mean(ppo.policy_loss(logprobs - old_logprobs, found, CLIP, CLIP), mask)
    loss = loss + ppo.masked_mean(ppo.value_loss(values, old_values, returns, CLIP), mask)
    by_logits, by_values = gradient(loss, logits, values)

    # By hand: -advantage * ratio * slope of the tokens that are not clipped, over two tokens.
    assert found.tolist()[0] == pytest.approx(advantages)
    factors = -found * ratios * torch.tensor([kept], dtype=torch.float64) / 2
    torch.testing.assert_close(by_logits, factors.T * SLOPES)
    # The second value moved by -1 to 0: if away from its return (3), to be undone; if towards it
    # (-1), by more than .2, nothing more to gain.
    second = -1.5 if score == 3.0 else 0.0
    assert by_values.tolist()[0] == pytest.approx([(0.6 - 0.5 - advantages[0]) / 2, second])

    # By autograd, through the formula of the paper, token by token.
    naive = 0.0
    for t, token in enumerate(TOKENS):
        policy = logits[t].exp() / logits[t].exp().sum()
        ratio = policy[token] / old_logprobs[0, t].exp()
        inside = min(max(ratio.item(), 1 - CLIP), 1 + CLIP)
        objective = ratio * advantages[t]
        if inside * advantages[t] < objective.item():
            objective = inside * advantages[t]
        target = old_values[0, t] + advantages[t]
        error = (values[0, t] - target) ** 2
        near = old_values[0, t] + (values[0, t] - old_values[0, t]).clamp(-CLIP, CLIP)
        naive = naive - objective / 2 + torch.max(error, (near - target) ** 2) / 4
    torch.testing.assert_close(loss, naive)
    for ours, theirs in zip((by_logits, by_values), gradient(naive, logits, values), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_gradient_of_kl_penalty_by_logits():
    logits, logprobs = policy_of_two_tokens()
    # Probability ratios of reference and policy: 1/2 and 1/4.
    ref_logprobs = logprobs.detach() - torch.tensor([[2.0, 4.0]], dtype=torch.float64).log()
    found = gradient(ppo.kl_penalty(logprobs, ref_logprobs, "k3").sum(), logits)
    # 1 - ref / policy, by the token's log-probability.
    factors = torch.tensor([[0.5], [0.75]], dtype=torch.float64)
    torch.testing.assert_close(found, factors * SLOPES)
    naive = 0.0
    for t, token in enumerate(TOKENS):
        ratio = ref_logprobs[0, t].exp() / (logits[t].exp() / logits[t].exp().sum())[token]
        naive = naive + ratio - 1 - ratio.log()
    torch.testing.assert_close(found, gradient(naive, logits))


@pytest.mark.parametrize(
    ("advantages_of", "expected"),
    [
        # Scores 3 and 1: 3 - 1 and 1 - 3; 3 - 2 and 1 - 2; (3 - 2) / (sqrt 2 + 1e-4) and its
        # opposite.
        (rloo_advantages, [2.0, -2.0]),
        (partial(grpo_advantages, scale_by_std=False), [1.0, -1.0]),
        (
            partial(grpo_advantages, scale_by_std=True),
            [1 / (math.sqrt(2) + 1e-4), -1 / (math.sqrt(2) + 1e-4)],
        ),
    ],
)
def test_gradients_of_losses_without_values_by_logits(advantages_of, expected):
    # Two responses of one token to two prompts: the policies above, tokens 0 and 1 by each.
    logits = PROBABILITIES.log().requires_grad_()
    logprobs = logits.log_softmax(dim=1).T
    advantages = advantages_of(torch.tensor([[3.0, 3.0], [1.0, 1.0]], dtype=torch.float64))
    loss = ppo.policy_loss(logprobs - logprobs.detach(), advantages, CLIP, CLIP).mean()
    found = gradient(loss, logits)
    # For any policy, the gradients of tokens 0 and 1 differ by (1, -1); the mean is over four.
    by_hand = torch.tensor([[-expected[0] / 4, expected[0] / 4]] * 2, dtype=torch.float64)
    torch.testing.assert_close(found, by_hand)
    naive = 0.0
    for prompt, response in itertools.product(range(2), range(2)):
        policy = logits[prompt].exp() / logits[prompt].exp().sum()
        naive = naive - expected[response] * policy[response].log() / 4
    torch.testing.assert_close(found, gradient(naive, logits))
