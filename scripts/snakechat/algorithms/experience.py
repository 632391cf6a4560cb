"""From rollouts to experience: token values, normalized scores, rewards, advantages, returns.

Shapes: B, R, A and n as in snakechat/algorithms/rollouts.py; N response tokens of a micro-batch.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from snakechat.algorithms import policy_gradient
from snakechat.algorithms.rollouts import Rollouts
from snakechat.config.rlhf import RlhfSettings
from snakechat.modeling.forward import Policy, Scorer
from snakechat.training.checkpointing import Attributes

# Returns a context with the reference model.
Reference = Callable[[], AbstractContextManager[nn.Module]]


class TokenEvaluation(NamedTuple):
    """What the models compute at each response token: tables [B, R].

    logprobs, entropies: Of the actor before the updates.
    ref_logprobs: Of the reference model; with `distill`, of the teacher.
    """

    logprobs: Tensor
    entropies: Tensor
    ref_logprobs: Tensor
    # None without a critic.
    values: Tensor | None


class Experience(NamedTuple):
    """What the updates of a step train on: tables [B, R], or the tokens [N] of a micro-batch.

    rewards: What advantages and returns have been computed from.
    importance_weights: Correction of each token's loss for the sampler's log-probabilities.
    values, returns: None without a critic.
    is_uniform: bool [n], whether all responses to a prompt have equal scores; the same for the
        whole step and for a micro-batch.
    kl_coef: The coefficient of the step.
    entropies: A table that the update fills in, as it does logprobs; None if logprobs are known.
    """

    logprobs: Tensor
    ref_logprobs: Tensor
    rewards: Tensor
    advantages: Tensor
    importance_weights: Tensor
    values: Tensor | None
    returns: Tensor | None
    is_uniform: Tensor
    kl_coef: float
    entropies: Tensor | None = None

    def select(self, tokens: Tensor) -> "Experience":
        """Return the tokens [N] at flat indices of the tables."""
        tables: dict[str, Any] = {
            name: table.flatten()[tokens]
            for name, table in self._asdict().items()
            if table is not None and name not in ("is_uniform", "kl_coef", "entropies")
        }
        return self._replace(**tables, entropies=None)


def evaluate_tokens(
    rollouts: Rollouts, actor: Policy | None, reference: Reference, critic: Scorer | None
) -> TokenEvaluation:
    """Run actor, reference and critic on the responses. Without an actor, its tables are 0."""
    if actor:
        logprobs, entropies = rollouts.logprobs_and_entropies(actor)
    else:
        logprobs, entropies = torch.zeros(2, *rollouts.response_mask.shape, device=rollouts.device)
    with reference() as reference_policy:
        ref_logprobs = rollouts.logprobs(cast(Policy, reference_policy))
    values = rollouts.values(critic) if critic else None
    return TokenEvaluation(logprobs, entropies, ref_logprobs, values)


def make_experience(
    settings: RlhfSettings,
    rollouts: Rollouts,
    evaluation: TokenEvaluation,
    scores: Tensor,
    kl_coef: float,
    is_evaluated: bool = True,
) -> Experience:
    """Return the experience of a step.

    Rewards are normalized scores, of which NaN adds nothing; kl_in: rewards adds the KL penalty.
    The rewards of `distill` have no part of the scores.

    Args:
        scores: [B], normalized. They determine which groups are uniform: with kl_in: rewards, the
            KL penalty makes the rewards of equal scores differ.
        is_evaluated: Whether the evaluation has the actor's tables (evaluated_in_update).
    """
    logprobs, ref_logprobs = evaluation.logprobs, evaluation.ref_logprobs
    mask = rollouts.response_mask
    if settings.algorithm == "distill":
        rewards = policy_gradient.distillation_rewards(logprobs, ref_logprobs, mask)
    else:
        penalties = policy_gradient.kl_penalty(logprobs, ref_logprobs, settings.kl_estimator)
        coefficient = kl_coef if settings.kl_in == "rewards" else 0.0
        rewards = policy_gradient.token_rewards(scores.nan_to_num(), penalties, mask, coefficient)
    advantages, returns = compute_advantages(
        settings, rewards, evaluation.values, mask, ~scores.isnan()
    )
    importance_weights = torch.ones_like(logprobs)
    if rollouts.sampler_logprobs is not None:
        importance_weights = policy_gradient.importance_weights(
            logprobs, rollouts.sampler_logprobs, settings.importance_sampling_cap
        )
    return Experience(
        logprobs,
        ref_logprobs,
        rewards,
        advantages,
        importance_weights,
        evaluation.values,
        returns,
        policy_gradient.uniform_groups(scores.view(settings.num_generations, -1)),
        kl_coef,
        None if is_evaluated else evaluation.entropies,
    )


def compute_advantages(
    settings: RlhfSettings,
    rewards: Tensor,
    values: Tensor | None,
    mask: Tensor,
    judged: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return advantages [B, R] and returns [B, R] of rewards [B, R].

    With values of a critic, by GAE; whiten_rewards and whiten_advantages normalize what goes into
    it and what comes out of it (Huang et al. 2024). Without a critic, the returns are None. The
    advantage of a token is its reward with `distill`. Otherwise, all tokens of a response have the
    same advantage, which compares its summed rewards with the other responses to the same prompt.

    judged: bool [B], which responses have a score; the others are not compared.
    """
    if settings.algorithm == "distill":
        return rewards, None
    if values is not None:
        if settings.whiten_rewards:
            # With their mean, which says whether the responses are good.
            rewards = policy_gradient.whiten(rewards, mask, shift_mean=False)
        advantages, returns = policy_gradient.gae(
            rewards, values, mask, settings.gamma, settings.gae_lambda
        )
        if settings.whiten_advantages:
            advantages = policy_gradient.whiten(advantages, mask)
        return advantages, returns
    # Not whitened: to subtract the mean over all prompts would give a prompt whose responses have
    # equal scores advantages other than 0.
    totals = rewards.sum(dim=1).masked_fill(~judged, math.nan)
    # All first responses, then all second ones.
    groups = totals.view(settings.num_generations, -1)
    if settings.algorithm == "rloo":
        advantages = policy_gradient.rloo_advantages(groups)
    else:
        advantages = policy_gradient.grpo_advantages(groups, settings.scale_by_std)
    return advantages.view(-1, 1) * mask, None


class KLController(Attributes):
    """Holds kl_coef: constant, or adapted towards kl_target (Ziegler et al. 2019, section 2.2)."""

    saved = ("coef",)

    def __init__(self, settings: RlhfSettings) -> None:
        self.coef = settings.kl_coef
        self.target, self.horizon = settings.kl_target, settings.kl_horizon

    def update(self, kl: float, num_responses: int) -> None:
        """Adapt the coefficient to the mean KL of a step, in nats per response."""
        if self.target is not None:
            self.coef = policy_gradient.adapted_kl_coef(
                self.coef, kl, self.target, self.horizon, num_responses
            )


class ScoreNormalization(Attributes):
    """Normalizes the scores of each step, clips them and subtracts penalties.

    Args:
        settings: The settings of the recipe.
        critic_weight: The weight of the reward model that a critic is initialized from, or None.

    Attributes:
        moments: Of the scores by whose mean and standard deviation scores are normalized; None
            before the first ones.
        critic_moments: As they were after the first different scores.
    """

    saved = ("moments", "critic_moments")

    def __init__(self, settings: RlhfSettings, critic_weight: float | None = None) -> None:
        self.settings, self.critic_weight = settings, critic_weight
        self.moments: policy_gradient.Moments | None = None
        self.critic_moments: policy_gradient.Moments | None = None

    def normalize(self, scores: Tensor, ended: Tensor, lengths: Tensor) -> Tensor:
        """Add scores to the moments and return normalized scores [B] as `normalized` does.

        NaN, the score of a response that nothing scores, stays NaN.

        `first` adds scores until two of them differ.
        """
        mode, judged = self.settings.standardize_scores, scores[~scores.isnan()]
        if (mode == "running" or (mode == "first" and not differ(self.moments))) and len(judged):
            added = policy_gradient.moments(judged)
            self.moments = (
                policy_gradient.merged_moments(self.moments, added) if self.moments else added
            )
            if not differ(self.critic_moments):
                self.critic_moments = self.moments
        return self.normalized(scores, ended, lengths)

    def normalize_values(self, values: Tensor) -> Tensor:
        """Return the outputs of a critic on the scale of normalized scores.

        A critic that is initialized from a reward model returns scores of this model.
        """
        if self.critic_weight is None:
            return values
        return standardized(self.critic_weight * values, self.critic_moments)

    def normalized(self, scores: Tensor, ended: Tensor, lengths: Tensor) -> Tensor:
        """Return scores [B] normalized and clipped, minus the penalty of responses that are long.

        The penalty is missing_eos_penalty without eos, and rises to it over overlong_buffer.

        Args:
            ended: bool [B], whether a response ends with eos.
            lengths: Tokens of each response [B].
        """
        settings = self.settings
        clip = settings.score_clip or math.inf
        normalized = standardized(scores, self.moments).clamp(-clip, clip)
        overlong = policy_gradient.overlong_penalties(
            lengths, settings.max_response_length, settings.overlong_buffer
        )
        return normalized - settings.missing_eos_penalty * torch.maximum(overlong, (~ended).float())


def differ(moments: policy_gradient.Moments | None) -> bool:
    """Return whether two different scores have these moments."""
    # Scores are float32: equal ones have squares of exactly 0 in float64.
    return moments is not None and moments[2] > 0


def standardized(scores: Tensor, moments: policy_gradient.Moments | None) -> Tensor:
    """Return scores minus the mean, divided by the standard deviation, of others that differ."""
    if moments is None or not differ(moments):
        return scores
    count, mean, squares = moments
    return (scores - mean) / math.sqrt(squares / count)
