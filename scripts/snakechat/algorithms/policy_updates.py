"""A step of RLHF: checks, rewards and advantages, the updates of actor and critic, and metrics.

The critic's loss is the mean over the response tokens of a minibatch (the responses of an optimizer
step); loss_aggregation defines the weights of the tokens in the policy's loss. Metrics are named as
in TRL.

Shapes: B, R, A and n as in snakechat/algorithms/rollouts.py.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from snakechat.algorithms import policy_gradient as pg
from snakechat.algorithms.rewards import Scores
from snakechat.algorithms.rollouts import Rollouts
from snakechat.config.rlhf import RlhfSettings
from snakechat.modeling.batching import Examples
from snakechat.training.checkpointing import Attributes
from snakechat.training.engine import Engine
from snakechat.training.trainer import text_gradients
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import all_reduce_sum

# Metrics of an update by name. None: not available, for example in an fp16 step that was skipped.
Metrics = dict[str, float | None]

POLICY_METRICS = ("loss", "kl", "ratio", "approxkl", "clipfrac_low", "clipfrac_high")

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

    logprobs: Tensor
    entropies: Tensor
    ref_logprobs: Tensor
    values: Tensor | None

    def kl(self, rollouts: Rollouts) -> Tensor:
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
    rewards: Tensor
    advantages: Tensor
    importance_weights: Tensor
    returns: Tensor | None
    is_uniform: Tensor
    kl_coef: float
    in_update: bool


def make_experience(
    settings: RlhfSettings,
    rollouts: Rollouts,
    evaluation: TokenEvaluation,
    scores: Tensor,
    kl_coef: float,
    in_update: bool = False,
) -> Experience:
    """Return the experience of a step.

    Rewards are normalized scores [B], of which NaN adds nothing; kl_in: rewards adds the KL
    penalty. Scores determine which groups are uniform: the KL penalty makes the rewards of equal
    scores differ.

    With values of a critic, advantages and returns are those of GAE, whitened with
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
            if settings.algorithm == "rloo":
                compared = pg.rloo_advantages(groups)
            else:
                compared = pg.grpo_advantages(groups, settings.scale_by_std)
            advantages = compared.view(-1, 1) * mask
    weights = torch.ones_like(logprobs)
    if rollouts.sampler_logprobs is not None:
        cap = settings.importance_sampling_cap
        weights = pg.importance_weights(logprobs, rollouts.sampler_logprobs, cap)
    is_uniform = pg.uniform_groups(scores.view(settings.num_generations, -1))
    return Experience(
        evaluation, rewards, advantages, weights, returns, is_uniform, kl_coef, in_update
    )


class RlhfState(Attributes):
    """What steps change besides the models: kl_coef, moments of the scores, counts of responses.

    Args:
        has_rewards: Whether reward models score, whose scores always differ.
        critic_weight: The weight of the reward model that a critic is initialized from, or None.

    Attributes:
        kl_coef: Constant, or adapted towards kl_target (Ziegler et al. 2019, section 2.2).
        moments: Of the scores by whose mean and standard deviation scores are normalized.
        num_unended: Responses since the last one with eos.
        num_equal: Responses with the same score, or none; -1 after two different scores.
        score: The first score.
    """

    saved = ("kl_coef", "moments", "num_unended", "num_equal", "score")

    def __init__(
        self, settings: RlhfSettings, has_rewards: bool = False, critic_weight: float | None = None
    ) -> None:
        self.settings, self.critic_weight = settings, critic_weight
        self.max_equal = 1 if has_rewards else MAX_EQUAL_SCORES
        self.kl_coef = settings.kl_coef
        self.moments: pg.Moments = (0, 0.0, 0.0)
        self.num_unended = self.num_equal = 0
        self.score: float | None = None

    def adapt_kl_coef(self, kl: Tensor) -> None:
        """Adapt kl_coef to the KL of the responses of a step [B], in nats, if it has a target.

        kl_coef * (1 + clip(kl / target - 1, -.2, .2) * len(kl) / horizon): Ziegler et al. 2019,
        section 2.2, where len(kl) / horizon is K_beta; at most 1, so that kl_coef stays positive.
        """
        if (target := self.settings.kl_target) is not None:
            error = min(max(kl.mean().item() / target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * min(len(kl) / self.settings.kl_horizon, 1)

    def add_scores(self, scores: Tensor) -> None:
        """With standardize_scores: first, add scores to the moments, until two of them differ."""
        judged = scores[~scores.isnan()]
        # Scores are float32: equal ones have squares of exactly 0 in float64.
        if self.settings.standardize_scores == "first" and not self.moments[2] and len(judged):
            self.moments = pg.added_moments(self.moments, judged)

    def normalized(self, scores: Tensor, rollouts: Rollouts) -> Tensor:
        """Return scores [B] normalized and clipped, minus the penalty of responses that are long.

        NaN, the score of a response that nothing scores, stays NaN. The penalty is
        missing_eos_penalty without eos, and rises to it over overlong_buffer.
        """
        settings, clip = self.settings, self.settings.score_clip or math.inf
        normalized = self._standardized(scores).clamp(-clip, clip)
        penalties = (~rollouts.ended).float()
        if buffer := settings.overlong_buffer:
            # Yu et al. 2025, eq. 13, with the sign reversed.
            excess = rollouts.lengths - (settings.max_response_length - buffer)
            penalties = torch.maximum((excess / buffer).clamp(0, 1), penalties)
        return normalized - settings.missing_eos_penalty * penalties

    def normalize_values(self, values: Tensor) -> Tensor:
        """Return the outputs of a critic on the scale of normalized scores."""
        weight = self.critic_weight
        return values if weight is None else self._standardized(weight * values)

    def _standardized(self, scores: Tensor) -> Tensor:
        count, mean, squares = self.moments
        return (scores - mean) / math.sqrt(squares / count) if squares else scores

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

    def check_scores(self, scores: Tensor, step: int) -> None:
        """Raise InputError if the scores [B] so far are equal or NaN, of max_equal responses."""
        judged = scores[~scores.isnan()]
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


# --- updates --------------------------------------------------------------------------------------


def informative_rows(rows: np.ndarray, experience: Experience) -> np.ndarray:
    """Return the prompts whose responses differ in their scores; all prompts if there are none.

    The others have no advantages, and only dilute the mean of a loss (dynamic sampling of DAPO, Yu
    et al. 2025, eq. 11, without sampling further prompts).
    """
    informative = rows[~experience.is_uniform.cpu().numpy()[rows]]
    return informative if len(informative) else rows


def policy_gradients(
    engine: Engine[Any],
    rollouts: Rollouts,
    rows: np.ndarray,
    experience: Experience,
    settings: RlhfSettings,
    text: Examples | None = None,
) -> dict[str, float]:
    """Accumulate the actor's gradients on the responses to the given prompts; return metrics.

    The loss of a token is importance_weight * clipped surrogate loss (Schulman et al. 2017, eq. 7).
    With `kl_in: loss`, the weighted KL penalty times kl_coef is added (Shao et al. 2024, eq. 3).
    The weights of the tokens follow from loss_aggregation. With `importance_sampling_level:
    sequence`, all tokens of a response have the mean log ratio of the response.

    With in_update, the tables of the actor's log-probabilities and entropies are filled in.

    text: Examples whose language modeling loss is added, multiplied by ptx_coef.
    """
    num_tokens = rollouts.num_tokens(rows)
    clip_ranges = settings.clip_range, settings.clip_range_high or settings.clip_range
    trained = rollouts.on_device(rollouts.responses_to(rows))
    weights = torch.zeros(rollouts.num_responses, device=rollouts.device)
    weights[trained] = pg.token_weights(
        rollouts.lengths[trained], settings.loss_aggregation, settings.max_response_length
    )
    evaluation, actor_tables = experience.evaluation, experience.evaluation[:2]
    tables = [evaluation.logprobs, evaluation.ref_logprobs]
    tables += [experience.advantages, experience.importance_weights]
    sums = torch.zeros(len(POLICY_METRICS), device=rollouts.device)
    packing = engine.module.supports_packing
    for micro_batch, responses, tokens in rollouts.micro_batches(rows, packing):
        old, ref_logprobs, advantages, importance = (table.flatten()[tokens] for table in tables)
        if experience.in_update:
            temperature = settings.temperature
            logprobs, entropies = engine(micro_batch.batch, temperature, return_entropies=True)
            old = logprobs.detach()
            if micro_batch.counted:
                for table, values in zip(actor_tables, (old, entropies), strict=True):
                    table.view(-1).index_copy_(0, tokens, values)
        else:
            logprobs = engine(micro_batch.batch, settings.temperature)
        log_ratios, lengths = logprobs - old, rollouts.lengths[responses]
        if settings.importance_sampling_level == "sequence":
            log_ratios = pg.sequence_log_ratios(log_ratios, lengths)
        losses = importance * pg.policy_loss(log_ratios, advantages, *clip_ranges)
        if settings.kl_in == "loss":
            penalties = pg.weighted_kl_penalty(logprobs, old, ref_logprobs, settings.kl_estimator)
            losses = losses + experience.kl_coef * importance * penalties
        token_weights = weights[responses].repeat_interleave(lengths, output_size=len(tokens))
        loss = micro_batch.counted / num_tokens * (token_weights * losses).sum()
        engine.backward(loss, micro_batch.is_last and text is None)
        statistics = pg.ratio_statistics(log_ratios.detach(), advantages, *clip_ranges)
        # The same estimate with all settings: k3 has the least variance.
        kl = pg.kl_penalty(logprobs.detach(), ref_logprobs, "k3")
        means = [each / num_tokens for each in (kl.sum(), *statistics.values())]
        sums += micro_batch.counted * torch.stack([loss.detach(), *means])
    totals = all_reduce_sum(sums).tolist()
    metrics = {f"policy/{name}": value for name, value in zip(POLICY_METRICS, totals, strict=True)}
    if experience.in_update:
        for table in actor_tables:
            table.copy_(all_reduce_sum(table))
    if settings.algorithm == "distill":
        metrics["policy/kl_to_teacher"] = metrics.pop("policy/kl")
    if text:
        # The pretraining mix of InstructGPT (Ouyang et al. 2022, eq. 2).
        all_rows, text_tokens = np.arange(len(text)), int(text.num_tokens(with_prompts=True).sum())
        micro_batches = text.micro_batches(all_rows, packing, rollouts.device, with_prompts=True)
        metrics["ptx/loss"] = text_gradients(engine, micro_batches, text_tokens, settings.ptx_coef)
    return metrics


def value_gradients(
    engine: Engine[Any],
    rollouts: Rollouts,
    rows: np.ndarray,
    experience: Experience,
    settings: RlhfSettings,
) -> dict[str, float]:
    """Accumulate the critic's gradients on the responses to the given prompts; return metrics."""
    num_tokens, clip_range = rollouts.num_tokens(rows), settings.value_clip_range
    assert experience.evaluation.values is not None and experience.returns is not None
    tables = experience.evaluation.values, experience.returns
    sums = torch.zeros(2, device=rollouts.device)
    for micro_batch, _, tokens in rollouts.micro_batches(rows, engine.module.supports_packing):
        old_values, returns = (table.flatten()[tokens] for table in tables)
        values: Tensor = engine(micro_batch.batch, micro_batch.batch.state_index)
        losses = pg.value_loss(values, old_values, returns, clip_range)
        loss = micro_batch.counted / num_tokens * losses.sum()
        engine.backward(loss, micro_batch.is_last)
        # As in value_loss, a clip_range of 0 clips none.
        clipped = ((values.detach() - old_values).abs() > (clip_range or math.inf)).sum()
        sums += micro_batch.counted * torch.stack([loss.detach(), clipped / num_tokens])
    loss_sum, clipfrac_sum = all_reduce_sum(sums).tolist()
    return {"value/loss": loss_sum, "value/clipfrac": clipfrac_sum}


def sample_text(ptx: Examples, settings: RlhfSettings, step: int, number: int) -> Examples:
    """Draw rows of text for an update of a step, as many as it has responses."""
    generator = np.random.default_rng([settings.seed, step, number])
    rows = generator.choice(len(ptx), min(settings.global_batch_size, len(ptx)), replace=False)
    return ptx.select(rows)


# --- metrics --------------------------------------------------------------------------------------


def kl_name(algorithm: str) -> str:
    """Return the name of the mean KL of responses."""
    return "objective/kl_to_teacher" if algorithm == "distill" else "objective/kl"


def step_metrics(
    algorithm: str,
    rollouts: Rollouts,
    experience: Experience,
    scores: Scores,
    updates: Sequence[Metrics],
) -> Metrics:
    """Return the metrics of a step, given its scores before normalization."""
    mask, evaluation = rollouts.response_mask, experience.evaluation
    rewards = experience.rewards.sum(dim=1)
    metrics: Metrics = {**response_metrics(algorithm, rollouts, evaluation, scores, rewards)}
    if algorithm != "distill":
        # Its reward is the KL itself.
        metrics["objective/kl_coef"] = experience.kl_coef
    if rollouts.sampler_logprobs is not None:
        differences = (evaluation.logprobs - rollouts.sampler_logprobs).abs()
        metrics["policy/sampler_difference"] = pg.masked_mean(differences, mask).item()
    if rollouts.num_responses > rollouts.num_prompts:
        metrics["objective/uniform_groups"] = experience.is_uniform.float().mean().item()
    metrics |= mean_metrics(updates)
    if evaluation.values is not None and experience.returns is not None:
        metrics["value/explained_var"] = pg.explained_variance(
            evaluation.values, experience.returns, mask
        )
    if "policy/ratio" in updates[0]:
        for name in ("ratio", "approxkl"):
            metrics[f"policy/first_{name}"] = updates[0][f"policy/{name}"]
    return metrics


def evaluation_metrics(
    settings: RlhfSettings,
    rollouts: Rollouts,
    evaluation: TokenEvaluation,
    scores: Scores,
    normalized_scores: Tensor,
) -> dict[str, float]:
    """Return the metrics of responses to held-out prompts.

    `objective/rlhf_reward` is what training maximizes, the mean normalized score [B] minus kl_coef
    times the KL, wherever the penalty is placed in training; with `distill`, minus the KL.
    """
    rewards = -evaluation.kl(rollouts)
    if settings.algorithm != "distill":
        judged = normalized_scores[~normalized_scores.isnan()]
        rewards = judged.sum() / max(len(judged), 1) + settings.kl_coef * rewards
    return response_metrics(settings.algorithm, rollouts, evaluation, scores, rewards)


def response_metrics(
    algorithm: str, rollouts: Rollouts, evaluation: TokenEvaluation, scores: Scores, rewards: Tensor
) -> dict[str, float]:
    """Return the metrics that steps and evaluations have. rewards: Of each response [B]."""
    entropy = pg.masked_mean(evaluation.entropies, rollouts.response_mask)
    lengths = rollouts.lengths.float()
    return {
        **scores.metrics(),
        kl_name(algorithm): evaluation.kl(rollouts).mean().item(),
        "objective/rlhf_reward": rewards.mean().item(),
        "objective/entropy": entropy.item(),
        "response/length": lengths.mean().item(),
        "response/length_p95": lengths.quantile(0.95).item(),
        "response/ended_by_eos": rollouts.ended.float().mean().item(),
    }


def mean_metrics(updates: Sequence[Metrics]) -> dict[str, float]:
    """Return the mean of each metric over the updates that have it."""
    values: dict[str, list[float]] = {}
    for metrics in updates:
        for name, value in metrics.items():
            # fp16: a skipped step has no gradient norm.
            if value is not None:
                values.setdefault(name, []).append(value)
    return {name: float(np.mean(present)) for name, present in values.items()}
