"""Scores of responses from reward models and reward functions, normalized for training.

Shapes: B responses, as in snakechat/algorithms/rollouts.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from snakechat.algorithms import ppo
from snakechat.algorithms.group_advantages import overlong_penalties
from snakechat.algorithms.reward_functions import Columns, columns_of
from snakechat.algorithms.reward_models import RewardModel, conversation_scores
from snakechat.algorithms.rollouts import Rollouts
from snakechat.config.rlhf import RlhfSettings
from snakechat.data.prompt_texts import PromptTexts
from snakechat.modeling.forward import Scorer
from snakechat.workflow.distributed import all_reduce_sum, rank
from snakechat.workflow.errors import InputError

# Scores texts: prompts, responses, and what else functions receive (reward_functions.Columns).
TextScorer = Callable[[list[str], list[str], Columns], np.ndarray | list[float]]


class ScoreNormalizer:
    """Normalizes scores by mean and standard deviation of the scores added so far.

    The identity before two different scores were added, except for the weight.

    weight: Of the scores that are normalized in those that were added.
    """

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight
        self.moments: ppo.Moments | None = None

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
        moments = ppo.moments(scores)
        self.moments = ppo.merged_moments(self.moments, moments) if self.moments else moments


class RewardSum:
    """The weighted sum of reward models and reward functions.

    Args:
        rewards: The reward models.
        functions: The reward functions; None if there are none.
        prompt_texts: The texts of the prompts, for functions and for reward models that read text.
    """

    def __init__(
        self,
        rewards: Sequence[RewardModel],
        functions: TextScorer | None,
        prompt_texts: PromptTexts | None = None,
    ) -> None:
        self.rewards, self.functions, self.prompt_texts = rewards, functions, prompt_texts

    def score(self, rollouts: Rollouts, step: int, rows: Sequence[int] | np.ndarray) -> Tensor:
        """Return the score of each response [B]: weighted reward models plus weighted functions.

        rows: row numbers of the prompts.

        Raises:
            InputError: A score is not finite.
        """
        scores = torch.zeros(len(rollouts.ended), device=rollouts.device)
        for reward in self.rewards:
            with reward.module.on_device() as module:
                values = self._model_scores(cast(Scorer, module), reward, rollouts, rows)
            scores += reward.weight * values
        if self.functions:
            # Only on rank 0: a function may return different scores when it is called again.
            given = self._function_scores(rollouts, rows) if rank() == 0 else [0.0] * len(scores)
            scores += all_reduce_sum(torch.as_tensor(given, dtype=torch.float32)).to(scores.device)
        if not scores.isfinite().all():
            index = int(scores.isfinite().logical_not().nonzero()[0])
            raise InputError(
                f"step {step}: the score of a response to row {rows[index % len(rows)]} is"
                f" {scores[index].item()}, expected a finite number: check the reward model"
            )
        return scores

    def _function_scores(
        self, rollouts: Rollouts, rows: Sequence[int] | np.ndarray
    ) -> np.ndarray | list[float]:
        """Return the weighted sum of the reward functions for each response [B]."""
        assert self.functions and self.prompt_texts
        prompts, responses = rollouts.decode()
        columns = columns_of(self.prompt_texts, rows, responses)
        return self.functions(prompts, responses, columns)

    def _model_scores(
        self,
        scorer: Scorer,
        reward: RewardModel,
        rollouts: Rollouts,
        rows: Sequence[int] | np.ndarray,
    ) -> Tensor:
        """Return a reward model's score of each response [B]."""
        if reward.reader.encoder is None:
            return rollouts.scores(scorer)
        assert self.prompt_texts
        responses = rollouts.response_texts()
        prompts = self.prompt_texts.prompts(rows) * (len(responses) // len(rows))
        scores = conversation_scores(
            scorer, reward.reader.encoder, prompts, responses, rollouts.micro_batch_tokens
        )
        return torch.from_numpy(scores).float().to(rollouts.device)


class ResponseScorer(RewardSum):
    """Scores responses in training, and normalizes the scores.

    Args:
        settings: The settings of the recipe; it calls the functions only if it has some.
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
        functions: TextScorer,
        critic_origin: RewardModel | None = None,
        prompt_texts: PromptTexts | None = None,
    ) -> None:
        super().__init__(rewards, functions if settings.reward_functions else None, prompt_texts)
        self.settings, self.critic_origin = settings, critic_origin
        self.normalizer = ScoreNormalizer()
        self.critic_normalizer = ScoreNormalizer(critic_origin.weight if critic_origin else 1.0)

    def normalize(self, scores: Tensor, ended: Tensor, lengths: Tensor) -> Tensor:
        """Return scores [B] normalized and clipped, minus the penalty of responses that are long.

        The penalty is missing_eos_penalty without eos, and rises to it over overlong_buffer.

        Args:
            ended: bool [B], whether a response ends with eos.
            lengths: Tokens of each response [B].

        Updates the normalizer: `first` adds the scores until two of them differ.
        """
        settings, mode = self.settings, self.settings.standardize_scores
        if mode == "running" or (mode == "first" and not self.normalizer.is_ready):
            self.normalizer.add(scores)
            if self.critic_origin and not self.critic_normalizer.is_ready:
                self.critic_normalizer.moments = self.normalizer.moments
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
