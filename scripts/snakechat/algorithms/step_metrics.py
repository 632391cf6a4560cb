"""Metrics of a step of RLHF, named as in TRL.

Shapes: B and R as in snakechat/algorithms/rollouts.py.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from snakechat.algorithms import ppo
from snakechat.algorithms.experience import Experience, TokenEvaluation
from snakechat.algorithms.ppo_updates import Metrics
from snakechat.algorithms.rollouts import Rollouts


def response_kl(rollouts: Rollouts, evaluation: TokenEvaluation) -> Tensor:
    """Return the estimated KL(actor || reference) of each response [B], in nats."""
    differences = evaluation.logprobs - evaluation.ref_logprobs
    return (differences * rollouts.response_mask).sum(dim=1)


def step_metrics(
    rollouts: Rollouts,
    evaluation: TokenEvaluation,
    experience: Experience,
    scores: Tensor,
    rewards: Tensor,
    kl_coef: float,
    updates: Sequence[Metrics],
) -> Metrics:
    """Return the metrics of a step.

    Args:
        scores: [B], before normalization.
        rewards: [B, R].
        updates: Metrics of each update.
    """
    mask = rollouts.response_mask
    metrics: Metrics = {
        "objective/scores": scores.mean().item(),
        "objective/scores_std": scores.std(correction=0).item(),
        "objective/kl": response_kl(rollouts, evaluation).mean().item(),
        "objective/kl_coef": kl_coef,
        "objective/rlhf_reward": rewards.sum(dim=1).mean().item(),
        "objective/entropy": ppo.masked_mean(evaluation.entropies, mask).item(),
        **rollouts.length_metrics(),
    }
    if rollouts.sampler_logprobs is not None:
        differences = (evaluation.logprobs - rollouts.sampler_logprobs).abs()
        metrics["policy/sampler_difference"] = ppo.masked_mean(differences, mask).item()
    if rollouts.num_responses > rollouts.num_prompts:
        metrics["objective/uniform_groups"] = experience.is_uniform.float().mean().item()
    metrics |= mean_metrics(updates)
    if experience.values is not None and experience.returns is not None:
        metrics["value/explained_var"] = ppo.explained_variance(
            experience.values, experience.returns, mask
        )
    if "policy/ratio" in updates[0]:
        for name in ("ratio", "approxkl"):
            metrics[f"policy/first_{name}"] = updates[0][f"policy/{name}"]
    return metrics


def mean_metrics(updates: Sequence[Metrics]) -> dict[str, float]:
    """Return the mean of each metric over the updates that have it."""
    values: dict[str, list[float]] = {}
    for metrics in updates:
        for name, value in metrics.items():
            values.setdefault(name, [])
            # fp16: a skipped step has no gradient norm.
            if value is not None:
                values[name].append(value)
    return {name: float(np.mean(present)) for name, present in values.items() if present}
