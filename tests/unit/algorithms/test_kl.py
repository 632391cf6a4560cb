"""Estimates of the KL, its coefficient and running moments, by hand and by exact sums."""

import math

import pytest
import torch

from snakechat.algorithms import policy_gradient


def test_kl_penalty_by_hand():
    # Reference twice as likely: 2 - 1 - log 2; half as likely: 1/2 - 1 + log 2; as likely: 0.
    ref = torch.tensor([[2.0, 0.5, 1.0]]).log() - 3.0
    log2 = math.log(2)
    for estimator, expected in (
        ("k1", [-log2, log2, 0.0]),
        ("k2", [log2**2 / 2, log2**2 / 2, 0.0]),
        ("k3", [1 - log2, log2 - 0.5, 0.0]),
    ):
        found = policy_gradient.kl_penalty(torch.full((1, 3), -3.0), ref, estimator)
        torch.testing.assert_close(found, torch.tensor([expected]))


def test_kl_penalty_is_never_negative_however_small_the_difference():
    sizes = torch.logspace(-12, 1.5, 10_001)
    for difference in (sizes, -sizes):
        penalty = policy_gradient.kl_penalty(torch.zeros_like(sizes), difference, "k3")
        assert (penalty >= 0).all()
    # Half the square.
    small = policy_gradient.kl_penalty(torch.tensor([0.0]), torch.tensor([1e-4]), "k3")
    assert small.item() == pytest.approx(5e-9, rel=1e-3)


def test_the_mean_gradient_of_kl_penalty_is_that_of_a_kl():
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=random, dtype=torch.float64, requires_grad=True)
    ref_logprobs = torch.randn(5, generator=random, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    sampled = logprobs.exp().detach()

    def gradient(loss):
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    kl = gradient((logprobs.exp() * (logprobs - ref_logprobs)).sum())
    # KL(ref || policy): by logits, policy - ref.
    reverse_kl = sampled - ref_logprobs.exp()
    for estimator, expected in (("k1", torch.zeros(5)), ("k2", kl), ("k3", reverse_kl)):
        penalty = (sampled * policy_gradient.kl_penalty(logprobs, ref_logprobs, estimator)).sum()
        torch.testing.assert_close(gradient(penalty), expected.double())


def test_the_weighted_penalty_of_a_bandit_is_exact_after_updates():
    # Three tokens; the policy has moved away from the one that sampled.
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    ref_logprobs = torch.tensor([0.0, 0.5, -0.5], dtype=torch.float64).log_softmax(0)
    old_logprobs = logits.log_softmax(0)
    moved = (logits + torch.tensor([1.0, -1.0, 0.5])).requires_grad_()
    logprobs = moved.log_softmax(0)

    def gradient(loss):
        return torch.autograd.grad(loss, moved, retain_graph=True)[0]

    exact = {
        "k2": gradient((logprobs.exp() * (logprobs - ref_logprobs)).sum()),
        "k3": gradient((ref_logprobs.exp() * (ref_logprobs - logprobs)).sum()),
    }
    for estimator, expected in exact.items():
        arguments = logprobs, old_logprobs, ref_logprobs, estimator
        weighted = policy_gradient.weighted_kl_penalty(*arguments)
        torch.testing.assert_close(gradient((old_logprobs.exp() * weighted).sum()), expected)


def test_distillation_rewards_by_hand():
    logprobs = torch.tensor([[0.5, 0.25, 0.5], [0.125, 0.5, 0.9]]).log()
    teacher = torch.tensor([[0.25, 0.5, 0.5], [1.0, 0.5, 0.1]]).log()
    mask = torch.tensor([[True, True, True], [True, True, False]])
    log2 = math.log(2)
    # Half as likely under the teacher, twice, as likely; 8 times; a token after the end.
    expected = torch.tensor([[-log2, log2, 0.0], [3 * log2, 0.0, 0.0]])
    torch.testing.assert_close(
        policy_gradient.distillation_rewards(logprobs, teacher, mask), expected
    )
    # A student that is the teacher has nothing to learn.
    assert not policy_gradient.distillation_rewards(teacher, teacher, mask).any()


@pytest.mark.parametrize(
    ("kl", "kl_coef"),
    [
        # Target 6, 512 rollouts, horizon 5,120: a tenth of the error, which ends at 20 %.
        (6.0, 0.05),
        (6.6, 0.05 * 1.01),
        (60.0, 0.05 * 1.02),
        (-3.0, 0.05 * 0.98),
    ],
)
def test_kl_coef_increases_with_the_kl(kl, kl_coef):
    assert policy_gradient.adapted_kl_coef(0.05, kl, 6.0, 5120, 512) == pytest.approx(kl_coef)
    # However short the horizon, it changes by a fifth at most.
    assert policy_gradient.adapted_kl_coef(0.05, 0.0, 6.0, 100, 600) == pytest.approx(0.04)


def test_moments_by_hand():
    # Mean 3; 4 + 1 + 0 + 9.
    assert policy_gradient.moments(torch.tensor([[1.0, 2.0], [3.0, 6.0]])) == (4, 3.0, 14.0)
    assert policy_gradient.moments(torch.tensor([5.0])) == (1, 5.0, 0.0)
    # More digits than fp32 has.
    found = policy_gradient.moments(torch.tensor([1e8, 1.0]))
    assert found == pytest.approx((2, 50_000_000.5, 2 * 49_999_999.5**2), rel=1e-12)


def test_merged_moments_of_batches_are_those_of_all_values():
    # Far from 0, where the sum of squares minus the square of the sum loses all digits.
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values += 1e8
    running = (0, 0.0, 0.0)
    for batch in values.split([1, 7, 500, 492]):
        running = policy_gradient.merged_moments(running, policy_gradient.moments(batch))
    count, mean, squares = running
    assert count == 1000
    assert mean == pytest.approx(values.mean().item(), rel=1e-14)
    assert squares / 999 == pytest.approx(values.var().item(), rel=1e-6)
