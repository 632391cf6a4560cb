"""Metrics of a step and of an evaluation of RLHF, named as in TRL; checks that stop it early.

Shapes: B and R as in snakechat/algorithms/rollouts.py.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from snakechat.algorithms import policy_gradient
from snakechat.algorithms.experience import Experience, TokenEvaluation
from snakechat.algorithms.policy_updates import Metrics
from snakechat.algorithms.reward_sum import Scores
from snakechat.algorithms.rollouts import Rollouts
from snakechat.training.checkpointing import Attributes
from snakechat.workflow.errors import InputError

# Number of responses after which reward functions that have returned a single score are considered
# useless. Before, sparse rewards may have found no success yet.
MAX_EQUAL_SCORES = 1000
# Number of consecutive responses without eos after which the actor is considered unable to end.
MAX_UNENDED = 500


def response_kl(rollouts: Rollouts, evaluation: TokenEvaluation) -> Tensor:
    """Return the estimated KL(actor || reference or teacher) of each response [B], in nats."""
    differences = evaluation.logprobs - evaluation.ref_logprobs
    return (differences * rollouts.response_mask).sum(dim=1)


def kl_name(algorithm: str) -> str:
    """Return the name of the mean KL of responses."""
    return "objective/kl_to_teacher" if algorithm == "distill" else "objective/kl"


def step_metrics(
    algorithm: str,
    rollouts: Rollouts,
    evaluation: TokenEvaluation,
    experience: Experience,
    scores: Scores,
    updates: Sequence[Metrics],
) -> Metrics:
    """Return the metrics of a step.

    Args:
        scores: Before normalization.
        updates: Metrics of each update.
    """
    mask, rewards = rollouts.response_mask, experience.rewards.sum(dim=1)
    metrics: Metrics = {**response_metrics(algorithm, rollouts, evaluation, scores, rewards)}
    if algorithm != "distill":
        # Its reward is the KL itself.
        metrics["objective/kl_coef"] = experience.kl_coef
    if rollouts.sampler_logprobs is not None:
        differences = (evaluation.logprobs - rollouts.sampler_logprobs).abs()
        metrics["policy/sampler_difference"] = policy_gradient.masked_mean(differences, mask).item()
    if rollouts.num_responses > rollouts.num_prompts:
        metrics["objective/uniform_groups"] = experience.is_uniform.float().mean().item()
    metrics |= mean_metrics(updates)
    if experience.values is not None and experience.returns is not None:
        metrics["value/explained_var"] = policy_gradient.explained_variance(
            experience.values, experience.returns, mask
        )
    if "policy/ratio" in updates[0]:
        for name in ("ratio", "approxkl"):
            metrics[f"policy/first_{name}"] = updates[0][f"policy/{name}"]
    return metrics


def evaluation_metrics(
    algorithm: str,
    rollouts: Rollouts,
    evaluation: TokenEvaluation,
    scores: Scores,
    normalized_scores: Tensor,
    kl_coef: float,
) -> dict[str, float]:
    """Return the metrics of responses to held-out prompts.

    `objective/rlhf_reward` is what training maximizes, the mean normalized score [B] minus kl_coef
    times the KL, wherever the penalty is placed in training; with `distill`, minus the KL.
    """
    kl = response_kl(rollouts, evaluation)
    judged = normalized_scores[~normalized_scores.isnan()]
    mean = judged.sum() / max(len(judged), 1)
    rewards = -kl if algorithm == "distill" else mean - kl_coef * kl
    return response_metrics(algorithm, rollouts, evaluation, scores, rewards)


def response_metrics(
    algorithm: str, rollouts: Rollouts, evaluation: TokenEvaluation, scores: Scores, rewards: Tensor
) -> dict[str, float]:
    """Return the metrics that steps and evaluations have. rewards: Of each response [B]."""
    return {
        **score_metrics(scores),
        kl_name(algorithm): response_kl(rollouts, evaluation).mean().item(),
        "objective/rlhf_reward": rewards.mean().item(),
        "objective/entropy": policy_gradient.masked_mean(
            evaluation.entropies, rollouts.response_mask
        ).item(),
        **rollouts.length_metrics(),
    }


def score_metrics(scores: Scores) -> dict[str, float]:
    """Return mean and standard deviation of scores; of several sources, also of each one.

    `rewards/NAME/unreadable` is the fraction of unreadable replies of an LLM judge, and
    `rewards/NAME/missing` of responses for which a reward function returned None; means leave them
    out. The metrics are empty if nothing scores responses, which `distill` allows.
    """
    if not scores.by_source:
        return {}
    metrics = _mean_and_std(scores.sum, "objective/scores", "objective/scores_std")
    for name, values in scores.by_source.items():
        if len(scores.by_source) > 1:
            metrics |= _mean_and_std(values, f"rewards/{name}/mean", f"rewards/{name}/std")
        if missing := values.isnan().float().mean().item():
            metrics[f"rewards/{name}/missing"] = missing
    for name, number in scores.unreadable.items():
        metrics[f"rewards/{name}/unreadable"] = number / len(scores.sum)
    return metrics


def _mean_and_std(values: Tensor, mean: str, std: str) -> dict[str, float]:
    """Return mean and standard deviation of values under these names; none if all are NaN."""
    values = values[~values.isnan()]
    return {mean: values.mean().item(), std: values.std(correction=0).item()} if len(values) else {}


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


class SanityChecks(Attributes):
    """Checks that responses end and that scores differ; counts responses until they do.

    has_rewards: Whether reward models score, whose scores always differ.
    """

    saved = ("num_unended", "num_equal", "score")

    def __init__(self, has_rewards: bool) -> None:
        self.num_unended = 0
        self.max_equal = 1 if has_rewards else MAX_EQUAL_SCORES
        # Responses with the same score, or none, since the first step; -1 after two different
        # scores.
        self.num_equal = 0
        self.score: float | None = None

    def check_responses(self, rollouts: Rollouts, step: int) -> None:
        """Check the responses of the next step.

        Raises:
            InputError: All responses are empty, or the last MAX_UNENDED ones have no eos.
        """
        number = len(rollouts.ended)
        if rollouts.ended.all() and rollouts.lengths.max() == 1:
            raise InputError(
                f"step {step}: all {number} responses are empty: the actor samples eos as its first"
                " token; check the responses that sft was trained on"
            )
        self.num_unended = 0 if rollouts.ended.any() else self.num_unended + number
        if self.num_unended >= MAX_UNENDED:
            raise InputError(
                f"step {step}: none of the last {self.num_unended} responses ended within"
                " max_response_length tokens: increase it, or train sft on responses that are not"
                " truncated"
            )

    def check_scores(self, scores: Tensor, step: int) -> None:
        """Check the scores [B] of the next step. A response may have none, NaN.

        Raises:
            InputError: All scores so far are equal, of max_equal responses or more.
        """
        if self.num_equal < 0:
            return
        judged = scores[~scores.isnan()]
        if self.score is None and len(judged):
            self.score = judged[0].item()
        if self.score is not None and (judged != self.score).any():
            self.num_equal = -1
            return
        self.num_equal += len(scores)
        if self.num_equal >= self.max_equal:
            raise InputError(
                f"step {step}: all {self.num_equal:,} responses so far have"
                f" {'no score' if self.score is None else f'the score {self.score:g}'}: without"
                " differences there is no training signal; check the reward model and functions"
            )
