"""Gradients of complete losses by the logits, by hand and by autograd."""

import itertools
import math
from functools import partial

import pytest
import torch

from snakechat.algorithms import policy_gradient
from snakechat.algorithms.group_advantages import grpo_advantages, rloo_advantages
from support.policies import CLIP, gradient, ragged_mask

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
    rewards = policy_gradient.token_rewards(scores, old_logprobs - ref_logprobs, mask, 0.1)
    found, returns = policy_gradient.gae(rewards, old_values, mask, 1.0, 0.5)
    loss = policy_gradient.masked_mean(
        policy_gradient.policy_loss(logprobs - old_logprobs, found, CLIP, CLIP), mask
    )
    loss = loss + policy_gradient.masked_mean(
        policy_gradient.value_loss(values, old_values, returns, CLIP), mask
    )
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
    found = gradient(policy_gradient.kl_penalty(logprobs, ref_logprobs, "k3").sum(), logits)
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
    loss = policy_gradient.policy_loss(logprobs - logprobs.detach(), advantages, CLIP, CLIP).mean()
    found = gradient(loss, logits)
    # For any policy, the gradients of tokens 0 and 1 differ by (1, -1); the mean is over four.
    by_hand = torch.tensor([[-expected[0] / 4, expected[0] / 4]] * 2, dtype=torch.float64)
    torch.testing.assert_close(found, by_hand)
    naive = 0.0
    for prompt, response in itertools.product(range(2), range(2)):
        policy = logits[prompt].exp() / logits[prompt].exp().sum()
        naive = naive - expected[response] * policy[response].log() / 4
    torch.testing.assert_close(found, gradient(naive, logits))
