"""From responses to what the updates of a step train on: checks, scores, rewards, advantages.

Shapes: B, R, A and n as in snakechat/algorithms/rollouts.py.
"""

import math
from typing import NamedTuple

import torch

from snakechat.algorithms import policy_gradient as pg
from snakechat.algorithms.rollouts import Rollouts
from snakechat.config.rlhf import RlhfSettings
from snakechat.training.checkpointing import Attributes
from snakechat.workflow.errors import InputError

# Number of responses after which reward functions that have returned a single score are considered
# useless. Before, sparse rewards may have found no success yet.
MAX_EQUAL_SCORES = 1000
# Number of consecutive responses without eos after which the actor is considered unable to end.
MAX_UNENDED = 500


class TokenEvaluation(NamedTuple):
    """What the models compute at each response token: tables [B, R].

    logprobs, entropies: Of the actor before the updates. Where the update of a step evaluates the
        actor by itself (evaluated_in_update), it fills in both.
    ref_logprobs: Of the reference model; with `distill`, of the teacher.
    values: None without a critic.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor
    ref_logprobs: torch.Tensor
    values: torch.Tensor | None

    def kl(self, rollouts: Rollouts) -> torch.Tensor:
        """Return the estimated KL(actor || reference or teacher) of each response [B], in nats."""
        return ((self.logprobs - self.ref_logprobs) * rollouts.response_mask).sum(dim=1)


class Experience(NamedTuple):
    """What the updates of a step train on: tables [B, R].

    rewards: What advantages and returns have been computed from.
    importance_weights: Correction of each token's loss for the sampler's log-probabilities.
    returns: None without a critic.
    is_uniform: bool [n], whether all responses to a prompt have equal scores.
    kl_coef: The coefficient of the step.
    in_update: Whether the update evaluates the actor by itself.
    """

    evaluation: TokenEvaluation
    rewards: torch.Tensor
    advantages: torch.Tensor
    importance_weights: torch.Tensor
    returns: torch.Tensor | None
    is_uniform: torch.Tensor
    kl_coef: float
    in_update: bool


def make_experience(
    settings: RlhfSettings,
    rollouts: Rollouts,
    evaluation: TokenEvaluation,
    scores: torch.Tensor,
    kl_coef: float,
    in_update: bool = False,
) -> Experience:
    """Return the experience of a step.

    Rewards are normalized scores [B], of which NaN adds nothing; kl_in: rewards adds the KL
    penalty. Scores determine which groups are uniform: the KL penalty makes the rewards of equal
    scores differ.

    With values of a critic, advantages and returns are computed by GAE, whitened with
    whiten_advantages (Huang et al. 2024). Without a critic, all tokens of a response have the same
    advantage, which compares its summed rewards with the other responses to the same prompt. The
    rewards of `distill` have no part of the scores; each is the advantage of its token.
    """
    logprobs, _, ref_logprobs, values = evaluation
    mask, returns = rollouts.response_mask, None
    if settings.algorithm == "distill":
        # Lu et al. 2025, "On-Policy Distillation": log(teacher / policy) of each token. The mean is
        # -KL(policy || teacher), the reverse KL of generalized knowledge distillation (Agarwal et
        # al. 2024, section 3.1). As the advantage of its token, it gives the gradient of the KL.
        rewards = advantages = -(logprobs - ref_logprobs) * mask
    else:
        penalties = pg.kl_penalty(logprobs, ref_logprobs, settings.kl_estimator)
        coefficient = kl_coef if settings.kl_in == "rewards" else 0.0
        rewards = pg.token_rewards(scores.nan_to_num(), penalties, mask, coefficient)
        if values is not None:
            advantages, returns = pg.gae(rewards, values, mask, settings.gamma, settings.gae_lambda)
            if settings.whiten_advantages:
                advantages = pg.whiten(advantages, mask)
        else:
            # Not whitened: to subtract the mean over all prompts would give a prompt whose
            # responses have equal scores advantages other than 0.
            totals = rewards.sum(dim=1).masked_fill(scores.isnan(), math.nan)
            # All first responses, then all second ones.
            groups = totals.view(settings.num_generations, -1)
            compared = (
                pg.rloo_advantages(groups)
                if settings.algorithm == "rloo"
                else pg.grpo_advantages(groups, settings.scale_by_std)
            )
            advantages = compared.view(-1, 1) * mask
    weights = torch.ones_like(logprobs)
    if rollouts.sampler_logprobs is not None:
        weights = pg.importance_weights(
            logprobs, rollouts.sampler_logprobs, settings.importance_sampling_cap
        )
    return Experience(
        evaluation,
        rewards,
        advantages,
        weights,
        returns,
        is_uniform=pg.uniform_groups(scores.view(settings.num_generations, -1)),
        kl_coef=kl_coef,
        in_update=in_update,
    )


class RlhfState(Attributes):
    """What steps change besides the models: kl_coef, moments of the scores, counts of responses.

    has_rewards: Whether reward models score, whose scores always differ.

    Attributes:
        kl_coef: Constant, or adapted towards kl_target (Ziegler et al. 2019, section 2.2).
        moments: Of the scores by whose mean and standard deviation scores are normalized.
        num_unended: Responses since the last one with eos.
        num_equal: Responses with the same score, or none; -1 after two different scores.
        score: The first score.
    """

    saved = ("kl_coef", "moments", "num_unended", "num_equal", "score")

    def __init__(self, settings: RlhfSettings, has_rewards: bool = False) -> None:
        self.settings = settings
        self.max_equal = 2 if has_rewards else MAX_EQUAL_SCORES
        self.kl_coef = settings.kl_coef
        self.moments: pg.Moments = (0, 0.0, 0.0)
        self.num_unended = self.num_equal = 0
        self.score: float | None = None

    def adapt_kl_coef(self, kl: torch.Tensor) -> None:
        """Adapt kl_coef to the KL of the responses of a step [B], in nats, if it has a target.

        kl_coef * (1 + clip(kl / target - 1, -.2, .2) * len(kl) / horizon): Ziegler et al. 2019,
        section 2.2, where len(kl) / horizon is K_beta; at most 1, so that kl_coef stays positive.
        """
        if (target := self.settings.kl_target) is not None:
            error = min(max(kl.mean().item() / target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * min(len(kl) / self.settings.kl_horizon, 1)

    def normalized(self, scores: torch.Tensor, rollouts: Rollouts) -> torch.Tensor:
        """Return scores [B] normalized and clipped, minus the penalty of responses that are long.

        NaN, the score of a response that nothing scores, stays NaN. The penalty is
        missing_eos_penalty without eos, and rises to it over overlong_buffer.
        """
        settings, clip = self.settings, self.settings.score_clip or math.inf
        penalties = (~rollouts.ended).float()
        if buffer := settings.overlong_buffer:
            # Yu et al. 2025, eq. 13, with the sign reversed.
            excess = rollouts.lengths - (settings.max_response_length - buffer)
            penalties = torch.maximum((excess / buffer).clamp(0, 1), penalties)
        return (
            self.standardized(scores).clamp(-clip, clip) - settings.missing_eos_penalty * penalties
        )

    def standardized(self, scores: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        """Return weight * scores, of any shape, standardized by the moments of the first scores."""
        count, mean, squares = self.moments
        weighted = weight * scores
        return (weighted - mean) / math.sqrt(squares / count) if squares else weighted

    def check_responses(self, rollouts: Rollouts, step: int) -> None:
        """Raise InputError if all responses are empty, or the last MAX_UNENDED ones have no eos."""
        if rollouts.ended.all() and rollouts.lengths.max() == 1:
            raise InputError(
                f"step {step}: all {len(rollouts.ended)} responses are empty: the actor samples eos"
                " as its first token; check the responses that sft was trained on"
            )
        self.num_unended = 0 if rollouts.ended.any() else self.num_unended + len(rollouts.ended)
        if self.num_unended >= MAX_UNENDED:
            raise InputError(
                f"step {step}: none of the last {self.num_unended} responses ended within"
                " max_response_length tokens: increase it, or train sft on responses that are not"
                " truncated"
            )

    def add_scores(self, scores: torch.Tensor, step: int) -> None:
        """Add the scores [B] of a step; with standardize_scores: first, to the moments as well.

        The moments count scores until two of them differ. Raises InputError if the scores so far
        are equal or NaN, of max_equal responses.
        """
        judged = scores[~scores.isnan()]
        # Scores are float32: equal ones have squares of exactly 0 in float64.
        if self.settings.standardize_scores == "first" and not self.moments[2] and len(judged):
            self.moments = pg.added_moments(self.moments, judged)
        if self.score is None and len(judged):
            self.score = judged[0].item()
        differ = self.score is not None and bool((judged != self.score).any())
        self.num_equal = -1 if differ or self.num_equal < 0 else self.num_equal + len(scores)
        if self.num_equal >= self.max_equal:
            score = "no score" if self.score is None else f"the score {self.score:g}"
            raise InputError(
                f"step {step}: all {self.num_equal:,} responses so far have {score}: the policy"
                " cannot learn from equal scores: check the reward model and functions"
            )
