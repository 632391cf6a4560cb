"""Scores of responses, normalized for training.

Shapes: B responses, as in snakechat/algorithms/rollouts.py.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from snakechat.algorithms import policy_gradient
from snakechat.config.rlhf import RlhfSettings


class ScoreNormalizer:
    """Normalizes scores by mean and standard deviation of the scores added so far.

    The identity before two different scores were added, except for the weight.

    weight: Of the scores that are normalized in those that were added.
    """

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.moments: policy_gradient.Moments | None = None

    def __call__(self, scores: Tensor) -> Tensor:
        scores = self.weight * scores
        if self.moments is None or not self.is_ready:
            return scores
        count, mean, squares = self.moments
        return (scores - mean) / math.sqrt(squares / count)

    @property
    def is_ready(self) -> bool:
        """Whether two different scores were added."""
        # Scores are float32: equal ones have squares of exactly 0 in float64.
        return self.moments is not None and self.moments[2] > 0

    def add(self, scores: Tensor) -> None:
        """Add scores to the sample, apart from NaN."""
        scores = scores[~scores.isnan()]
        if not len(scores):
            return
        moments = policy_gradient.moments(scores)
        self.moments = (
            policy_gradient.merged_moments(self.moments, moments) if self.moments else moments
        )


class ScoreNormalization:
    """Normalizes the scores of each step, clips them and subtracts penalties.

    Args:
        settings: The settings of the recipe.
        critic_weight: The weight of the reward model that a critic is initialized from, or None.

    Attributes:
        normalizer: Normalizes the scores of each step.
        critic_normalizer: The normalizer as it was after the first different scores. A critic
            initialized from a reward model applies it to its outputs; the identity without such a
            reward model.
    """

    def __init__(self, settings: RlhfSettings, critic_weight: float | None = None) -> None:
        self.settings, self.has_origin = settings, critic_weight is not None
        self.normalizer = ScoreNormalizer()
        self.critic_normalizer = ScoreNormalizer(1.0 if critic_weight is None else critic_weight)

    def normalize(self, scores: Tensor, ended: Tensor, lengths: Tensor) -> Tensor:
        """Update the normalizer and return normalized scores [B] as `normalized` does.

        NaN, the score of a response that nothing scores, stays NaN.

        `first` adds the scores to the normalizer until two of them differ.
        """
        mode = self.settings.standardize_scores
        if mode == "running" or (mode == "first" and not self.normalizer.is_ready):
            self.normalizer.add(scores)
            if self.has_origin and not self.critic_normalizer.is_ready:
                self.critic_normalizer.moments = self.normalizer.moments
        return self.normalized(scores, ended, lengths)

    def normalized(self, scores: Tensor, ended: Tensor, lengths: Tensor) -> Tensor:
        """Return scores [B] normalized and clipped, minus the penalty of responses that are long.

        The penalty is missing_eos_penalty without eos, and rises to it over overlong_buffer.

        Args:
            ended: bool [B], whether a response ends with eos.
            lengths: Tokens of each response [B].
        """
        settings = self.settings
        clip = settings.score_clip or math.inf
        normalized = self.normalizer(scores).clamp(-clip, clip)
        overlong = policy_gradient.overlong_penalties(
            lengths, settings.max_response_length, settings.overlong_buffer
        )
        return normalized - settings.missing_eos_penalty * torch.maximum(overlong, (~ended).float())

    def state_dict(self) -> dict[str, Any]:
        return {
            "normalizer": self.normalizer.moments,
            "critic_normalizer": self.critic_normalizer.moments,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.normalizer.moments = state["normalizer"]
        self.critic_normalizer.moments = state["critic_normalizer"]
