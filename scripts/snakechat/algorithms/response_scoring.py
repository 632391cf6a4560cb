"""Scores of responses, normalized for training.

Shapes: B responses, as in snakechat/algorithms/rollouts.py.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from snakechat.algorithms import policy_gradient
from snakechat.algorithms.group_advantages import overlong_penalties
from snakechat.algorithms.reward_functions import WeightedFunctions
from snakechat.algorithms.reward_models import RewardModel
from snakechat.algorithms.reward_sum import RewardSum, WeightedJudge
from snakechat.config.rlhf import RlhfSettings
from snakechat.data.prompt_texts import PromptTexts


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
        """Add scores to the sample."""
        moments = policy_gradient.moments(scores)
        self.moments = (
            policy_gradient.merged_moments(self.moments, moments) if self.moments else moments
        )


class ResponseScorer(RewardSum):
    """Scores responses in training, and normalizes the scores.

    Args:
        settings: The settings of the recipe.
        rewards, functions, prompt_texts, judges: As in RewardSum.
        critic_origin: The reward model that a critic is initialized from, or None.

    Attributes:
        normalizer: Normalizes the scores of each step.
        critic_normalizer: The normalizer as it was after the first different scores. A critic
            initialized from a reward model applies it to its outputs; the identity without such a
            reward model.
    """

    def __init__(
        self,
        settings: RlhfSettings,
        rewards: Sequence[RewardModel],
        functions: WeightedFunctions,
        prompt_texts: PromptTexts,
        judges: Sequence[WeightedJudge] = (),
        critic_origin: RewardModel | None = None,
    ) -> None:
        super().__init__(rewards, functions, prompt_texts, judges)
        self.settings, self.critic_origin = settings, critic_origin
        self.normalizer = ScoreNormalizer()
        self.critic_normalizer = ScoreNormalizer(critic_origin.weight if critic_origin else 1.0)

    def normalize(self, scores: Tensor, ended: Tensor, lengths: Tensor) -> Tensor:
        """Update the normalizer and return normalized scores [B] as `normalized` does.

        `first` adds the scores to the normalizer until two of them differ.
        """
        mode = self.settings.standardize_scores
        if mode == "running" or (mode == "first" and not self.normalizer.is_ready):
            self.normalizer.add(scores)
            if self.critic_origin and not self.critic_normalizer.is_ready:
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
        overlong = overlong_penalties(
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
