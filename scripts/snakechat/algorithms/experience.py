"""From rollouts to experience: token values of all models, rewards, advantages and returns.

Shapes: B, R, A and n as in snakechat/algorithms/rollouts.py; N response tokens of a micro-batch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from snakechat.algorithms import ppo
from snakechat.algorithms.rollouts import Rollouts
from snakechat.config.rlhf import RlhfSettings
from snakechat.modeling.forward import Policy, Scorer

# Advantages of the algorithms without a critic, from scores of the responses to the same prompt.
GROUP_ADVANTAGES = {"rloo": ppo.rloo_advantages, "grpo": ppo.grpo_advantages}

# Returns a context with the reference model.
Reference = Callable[[], AbstractContextManager[nn.Module]]


class TokenEvaluation(NamedTuple):
    """What the models compute at each response token before the updates: tables [B, R]."""

    logprobs: Tensor
    entropies: Tensor
    ref_logprobs: Tensor
    # None without a critic.
    values: Tensor | None


class Experience(NamedTuple):
    """What the updates of a step train on: tables [B, R], or the tokens [N] of a micro-batch.

    importance_weights: Correction of each token's loss for the sampler's log-probabilities.
    values, returns: None without a critic.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    importance_weights: Tensor
    values: Tensor | None
    returns: Tensor | None

    def select(self, indices: Tensor, mask: Tensor) -> "Experience":
        """Return the tokens [N] of the responses indices [b] with response_mask mask [b, R]."""

        def tokens(table: Tensor) -> Tensor:
            return table[indices][mask]

        return Experience(
            tokens(self.logprobs),
            tokens(self.ref_logprobs),
            tokens(self.advantages),
            tokens(self.importance_weights),
            None if self.values is None else tokens(self.values),
            None if self.returns is None else tokens(self.returns),
        )


def evaluate_tokens(
    rollouts: Rollouts, actor: Policy, reference: Reference, critic: Scorer | None
) -> TokenEvaluation:
    """Run actor, reference and critic on the responses."""
    logprobs, entropies = rollouts.logprobs_and_entropies(actor)
    with reference() as reference_policy:
        ref_logprobs = rollouts.logprobs(cast(Policy, reference_policy))
    values = rollouts.values(critic) if critic else None
    return TokenEvaluation(logprobs, entropies, ref_logprobs, values)


def make_rewards(
    settings: RlhfSettings,
    rollouts: Rollouts,
    evaluation: TokenEvaluation,
    scores: Tensor,
    kl_coef: float,
) -> Tensor:
    """Return rewards [B, R] of normalized scores [B]; kl_in: rewards adds the KL penalty."""
    return ppo.token_rewards(
        scores,
        evaluation.logprobs,
        evaluation.ref_logprobs,
        rollouts.response_mask,
        kl_coef if settings.kl_in == "rewards" else 0.0,
    )


def make_experience(
    settings: RlhfSettings, rollouts: Rollouts, evaluation: TokenEvaluation, rewards: Tensor
) -> Experience:
    """Compute advantages, returns and importance weights from rewards [B, R]."""
    advantages, returns = compute_advantages(
        settings, rewards, evaluation.values, rollouts.response_mask
    )
    importance_weights = torch.ones_like(evaluation.logprobs)
    if rollouts.sampler_logprobs is not None:
        importance_weights = ppo.importance_weights(
            evaluation.logprobs, rollouts.sampler_logprobs, settings.importance_sampling_cap
        )
    return Experience(
        evaluation.logprobs,
        evaluation.ref_logprobs,
        advantages,
        importance_weights,
        evaluation.values,
        returns,
    )


def compute_advantages(
    settings: RlhfSettings, rewards: Tensor, values: Tensor | None, mask: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return advantages [B, R] and returns [B, R] of rewards [B, R].

    With values of a critic, by GAE. Without a critic, all tokens of a response have the same
    advantage, which compares its summed rewards with those of the responses to the same prompt, and
    the returns are None.
    """
    if values is not None:
        advantages, returns = ppo.gae(rewards, values, mask, settings.gamma, settings.gae_lambda)
    else:
        # Rows of a table: all first responses, then all second ones.
        groups = rewards.sum(dim=1).view(settings.num_generations, -1)
        advantages = GROUP_ADVANTAGES[settings.algorithm](groups).view(-1, 1) * mask
        returns = None
    if settings.whiten_advantages:
        advantages = ppo.whiten(advantages, mask)
    return advantages, returns
