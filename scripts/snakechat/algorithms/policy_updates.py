"""The updates of actor and critic in a step of RLHF, and its metrics.

The critic's loss is the mean over the response tokens of a minibatch (the responses of an optimizer
step); loss_aggregation defines the weights of the tokens in the policy's loss. Metrics are named as
in TRL.

Shapes: B, R, A and n as in snakechat/algorithms/rollouts.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from snakechat.algorithms import policy_gradient as pg
from snakechat.algorithms.experience import Experience, TokenEvaluation
from snakechat.algorithms.rewards import Scores
from snakechat.algorithms.rollouts import Rollouts
from snakechat.config.rlhf import RlhfSettings
from snakechat.modeling.batching import Examples
from snakechat.training.engine import Engine
from snakechat.training.trainer import Metrics, text_gradients
from snakechat.workflow.processes import all_reduce_sum

POLICY_METRICS = ("loss", "kl", "ratio", "approxkl", "clipfrac_low", "clipfrac_high")


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
    tables = (
        evaluation.logprobs,
        evaluation.ref_logprobs,
        experience.advantages,
        experience.importance_weights,
    )
    sums = torch.zeros(len(POLICY_METRICS), device=rollouts.device)
    packing = engine.module.supports_packing
    for micro_batch, responses, tokens in rollouts.micro_batches(rows, packing):
        old, ref_logprobs, advantages, importance = (table.flatten()[tokens] for table in tables)
        if experience.in_update:
            logprobs, entropies = engine(
                micro_batch.batch, settings.temperature, return_entropies=True
            )
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
        metrics["ptx/loss"] = text_gradients(
            engine,
            text.micro_batches(np.arange(len(text)), packing, rollouts.device, with_prompts=True),
            int(text.num_tokens(with_prompts=True).sum()),
            settings.ptx_coef,
        )
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
        values: torch.Tensor = engine(micro_batch.batch, micro_batch.batch.state_index)
        losses = pg.value_loss(values, old_values, returns, clip_range)
        loss = micro_batch.counted / num_tokens * losses.sum()
        engine.backward(loss, micro_batch.is_last)
        # As in value_loss, a clip_range of 0 clips none.
        clipped = ((values.detach() - old_values).abs() > (clip_range or torch.inf)).sum()
        sums += micro_batch.counted * torch.stack([loss.detach(), clipped / num_tokens])
    loss_sum, clipfrac_sum = all_reduce_sum(sums).tolist()
    return {"value/loss": loss_sum, "value/clipfrac": clipfrac_sum}


def sample_text(ptx: Examples, settings: RlhfSettings, step: int, number: int) -> Examples:
    """Draw rows of text for an update of a step, as many as a whole batch has responses."""
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
    metrics: dict[str, float | None] = {
        **response_metrics(algorithm, rollouts, evaluation, scores, rewards)
    }
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
        metrics |= {
            f"policy/first_{name}": updates[0][f"policy/{name}"] for name in ("ratio", "approxkl")
        }
    return metrics


def evaluation_metrics(
    settings: RlhfSettings,
    rollouts: Rollouts,
    evaluation: TokenEvaluation,
    scores: Scores,
    normalized_scores: torch.Tensor,
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
    algorithm: str,
    rollouts: Rollouts,
    evaluation: TokenEvaluation,
    scores: Scores,
    rewards: torch.Tensor,
) -> dict[str, float]:
    """Return the metrics that steps and evaluations have. rewards: Of each response [B]."""
    lengths = rollouts.lengths.float()
    return {
        **scores.metrics(),
        kl_name(algorithm): evaluation.kl(rollouts).mean().item(),
        "objective/rlhf_reward": rewards.mean().item(),
        "objective/entropy": pg.masked_mean(evaluation.entropies, rollouts.response_mask).item(),
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
