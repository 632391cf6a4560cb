"""The sum of the scores that reward models and reward functions give to responses.

Shapes: B responses, as in snakechat/algorithms/rollouts.py.
"""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from snakechat.algorithms.reward_functions import Columns, columns_of
from snakechat.algorithms.reward_models import RewardModel, conversation_scores
from snakechat.algorithms.rollouts import Rollouts
from snakechat.data.prompt_texts import PromptTexts
from snakechat.modeling.forward import Scorer
from snakechat.workflow.distributed import all_reduce_sum, rank
from snakechat.workflow.errors import InputError

# Scores texts: prompts, responses, and what else functions receive (reward_functions.Columns).
TextScorer = Callable[[list[str], list[str], Columns], np.ndarray | list[float]]


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
