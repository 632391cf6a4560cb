"""Bandits: one prompt, responses of one token, for which the optimum of each loss is known."""

import math
from functools import partial

import pytest
import torch

from snakechat.algorithms import policy_gradient
from snakechat.algorithms.group_advantages import grpo_advantages, rloo_advantages
from support.policies import CLIP, gradient, vocabulary


def pairs_of(arms):
    """All pairs of responses [2, arms * arms]."""
    return torch.cartesian_prod(torch.arange(arms), torch.arange(arms)).T


def mean_loss_of_pairs(logits, rewards, advantages_of):
    """The expected policy loss over all pairs of responses under the policy."""
    pairs, logprobs = pairs_of(len(rewards)), logits.log_softmax(0)
    probability = logprobs.detach()[pairs].sum(dim=0).exp()
    advantages = advantages_of(rewards[pairs])
    losses = policy_gradient.policy_loss(
        (logprobs - logprobs.detach())[pairs], advantages, CLIP, CLIP
    )
    return (probability * losses.mean(dim=0)).sum()


@pytest.mark.parametrize("seed", range(1))
def test_the_gradient_with_rloo_advantages_is_unbiased(seed):
    logits, _ = vocabulary(seed)
    rewards = torch.tensor([3.0, -1.0, 0.5, 2.0, 1.0], dtype=torch.float64)
    actual = gradient(mean_loss_of_pairs(logits, rewards, rloo_advantages), logits)
    mean_reward = (logits.softmax(0) * rewards).sum()
    torch.testing.assert_close(actual, gradient(-mean_reward, logits))


REWARDS = torch.tensor([1.0, 0.0, 0.5, -1.0])
REF_LOGPROBS = torch.tensor([0.1, 0.4, 0.3, 0.2]).log()
KL_COEF = 0.5


def optimal_policy():
    """The maximum of reward - KL_COEF * KL: ref * exp(reward / KL_COEF), normalized; its value."""
    weights = REF_LOGPROBS + REWARDS / KL_COEF
    return weights.softmax(0), KL_COEF * weights.logsumexp(0)


def sampled(logits, count, random):
    """Tokens [count] sampled from the policy, and their log-probabilities."""
    tokens = torch.multinomial(logits.detach().softmax(0), count, True, generator=random)
    return tokens, logits.log_softmax(0)[tokens]


def test_ppo_converges_to_the_optimal_policy_and_its_value():
    random = torch.Generator().manual_seed(0)
    logits = REF_LOGPROBS.clone().requires_grad_()
    value = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.SGD([logits, value], lr=1.0)
    mask = torch.ones(256, 1, dtype=torch.bool)
    for _ in range(300):
        tokens, old_logprobs = sampled(logits.detach(), 256, random)
        tokens, old_logprobs = tokens[:, None], old_logprobs[:, None]
        old_values = value.detach().expand(256, 1)
        rewards = policy_gradient.token_rewards(
            REWARDS[tokens[:, 0]], old_logprobs - REF_LOGPROBS[tokens], mask, KL_COEF
        )
        advantages, returns = policy_gradient.gae(rewards, old_values, mask, 1.0, 0.95)
        for _ in range(2):
            logprobs = logits.log_softmax(0)[tokens]
            loss = policy_gradient.policy_loss(
                logprobs - old_logprobs, advantages, CLIP, CLIP
            ).mean()
            values = value.expand(256, 1)
            loss = loss + policy_gradient.value_loss(values, old_values, returns, CLIP).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    policy, optimum = optimal_policy()
    torch.testing.assert_close(logits.detach().softmax(0), policy, rtol=0, atol=1e-3)
    # At the optimum, reward - KL_COEF * log ratio is the same for all tokens.
    torch.testing.assert_close(value.detach(), optimum, rtol=0, atol=1e-3)


def test_rloo_converges_to_the_optimal_policy():
    random = torch.Generator().manual_seed(0)
    logits = REF_LOGPROBS.clone().requires_grad_()
    optimizer = torch.optim.SGD([logits], lr=1.0)
    for _ in range(300):
        tokens, logprobs = sampled(logits, 256, random)
        kl = (logprobs - REF_LOGPROBS[tokens]).detach()
        scores = (REWARDS[tokens] - KL_COEF * kl).view(4, 64)
        advantages = rloo_advantages(scores).flatten()
        loss = policy_gradient.policy_loss(
            logprobs - logprobs.detach(), advantages, CLIP, CLIP
        ).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    policy, _ = optimal_policy()
    torch.testing.assert_close(logits.detach().softmax(0), policy, rtol=0, atol=1e-3)


def test_grpo_with_k3_converges_to_another_policy():
    # Two arms, rewards 1 and 0, pairs of responses, reference 1/2. A mixed pair (a share of
    # 2 p (1 - p)) contributes 1 / sqrt 2 / 2 to the gradient, k3 -kl_coef * (p - 1/2):
    # p (1 - p) / sqrt 2 = kl_coef * (p - 1/2), so p = 3/4 at a kl_coef of 3/4 / sqrt 2.
    kl_coef = 0.75 / math.sqrt(2)
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    ref_logprobs = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    logits = ref_logprobs.clone().requires_grad_()
    scaled_by_std = partial(grpo_advantages, scale_by_std=True)
    for _ in range(200):
        logprobs = logits.log_softmax(0)
        penalty = (
            logprobs.exp().detach() * policy_gradient.kl_penalty(logprobs, ref_logprobs, "k3")
        ).sum()
        loss = mean_loss_of_pairs(logits, rewards, scaled_by_std) + kl_coef * penalty
        with torch.no_grad():
            logits -= gradient(loss, logits)
    # ref * exp(reward / kl_coef) would be .868: sigmoid(sqrt 2 * 4 / 3).
    assert logits.softmax(0)[0].item() == pytest.approx(0.75, abs=1e-4)
