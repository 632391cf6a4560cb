"""The scores that reward models, LLM judges and reward functions give to responses, and their sum.

Shapes: B responses, as in snakechat/algorithms/rollouts.py.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from snakechat.algorithms.llm_judge import LlmJudge, fill_missing
from snakechat.algorithms.reward_functions import WeightedFunctions, function_columns
from snakechat.algorithms.reward_models import RewardModel, conversation_examples
from snakechat.algorithms.rollouts import Rollouts
from snakechat.config.references import (
    JUDGES,
    RewardReferences,
    judge_names,
    weighted_references,
)
from snakechat.data.records import PromptTexts
from snakechat.modeling.forward import Scorer, response_scores
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import all_reduce_sum, rank


class Scores(NamedTuple):
    """Scores of responses.

    Attributes:
        sum: Weighted sum of all scores [B]; NaN of a response that nothing scores, because all
            reward functions returned None.
        by_source: Scores [B], without weights, of each reward function NAME, of each reward model,
            by the job's input (reward, or reward.1), and of each LLM judge, by llm_judges/NAME.
            A function's score is NaN where it returned None, and is no part of the sum.
        unreadable: Number of unreadable replies of each LLM judge, whose responses have the mean of
            the others (fill_missing).
    """

    sum: Tensor
    by_source: dict[str, Tensor]
    unreadable: dict[str, int]


# Weight and LLM judge.
WeightedJudge = tuple[float, LlmJudge]


def weighted_judges(
    references: RewardReferences, judges: Mapping[str, LlmJudge]
) -> list[WeightedJudge]:
    """Return the LLM judges that `reward` or `judge` names, with their weights."""
    weights = weighted_references(references)
    return [(weights[f"{JUDGES}/{name}"], judges[name]) for name in judge_names(references)]


class RewardSum:
    """The weighted sum of reward models, LLM judges and reward functions.

    Args:
        rewards: The reward models.
        functions: The reward functions.
        prompt_texts: The texts of the prompts, for functions, judges and reward models that read
            text.
        judges: The LLM judges.
    """

    def __init__(
        self,
        rewards: Sequence[RewardModel],
        functions: WeightedFunctions,
        prompt_texts: PromptTexts,
        judges: Sequence[WeightedJudge] = (),
    ) -> None:
        self.rewards, self.functions, self.prompt_texts = rewards, functions, prompt_texts
        self.judges = judges

    def score(self, rollouts: Rollouts, step: int, rows: Sequence[int] | np.ndarray) -> Scores:
        """Return the scores of the responses.

        rows: row numbers of the prompts.

        Raises:
            InputError: A score is not finite, an endpoint failed, or no reply of a judge is
                readable.
        """
        total = torch.zeros(len(rollouts.ended), device=rollouts.device)
        by_source: dict[str, Tensor] = {}
        unreadable: dict[str, int] = {}
        for reward in self.rewards:
            by_source[reward.name] = self._model_scores(reward, rollouts, rows)
            total += reward.weight * by_source[reward.name]
        for weight, judge in self.judges:
            name, responses = f"{JUDGES}/{judge.name}", rollouts.response_texts()
            prompts = self.prompt_texts.prompts(rows) * (len(responses) // len(rows))
            ratings = judge.rate(prompts, responses).reshape(-1, len(rows))
            unreadable[name] = int(np.isnan(ratings).sum())
            by_source[name] = torch.from_numpy(fill_missing(ratings)).flatten().to(total)
            total += weight * by_source[name]
        if self.functions:
            tables = self._function_scores(rollouts, rows)
            for (name, (weight, _)), values in zip(self.functions.items(), tables, strict=True):
                by_source[name] = values
                total += (weight * values).where(~values.isnan(), 0)
        if not total.isfinite().all():
            index = int(total.isfinite().logical_not().nonzero()[0])
            raise InputError(
                f"step {step}: the score of a response to row {rows[index % len(rows)]} is"
                f" {total[index].item()}, expected a finite number: check the reward models,"
                " functions and weights"
            )
        if self.functions and not self.rewards and not self.judges:
            total[tables.isnan().all(dim=0)] = math.nan
        return Scores(total, by_source, unreadable)

    def _function_scores(self, rollouts: Rollouts, rows: Sequence[int] | np.ndarray) -> Tensor:
        """Return the score of each function for each response [f, B]; NaN for None."""
        scores = torch.zeros(len(self.functions), len(rollouts.ended))
        # Only on rank 0: a function may return different scores when it is called again.
        if rank() == 0:
            prompts, responses = rollouts.decode()
            columns = function_columns(self.prompt_texts, rows, responses)
            for row, (_, function) in zip(scores, self.functions.values(), strict=True):
                row[:] = torch.as_tensor(function(prompts, responses, columns))
        return all_reduce_sum(scores).to(rollouts.device)

    def _model_scores(
        self, reward: RewardModel, rollouts: Rollouts, rows: Sequence[int] | np.ndarray
    ) -> Tensor:
        """Return a reward model's score of each response [B]."""
        examples, encoder = rollouts.examples, reward.encoder
        with reward.module.on_device() as module:
            scorer = cast(Scorer, module)
            if encoder:
                responses = rollouts.response_texts()
                prompts = self.prompt_texts.turns(rows) * (len(responses) // len(rows))
                examples = conversation_examples(scorer, encoder, prompts, responses)
            scores = response_scores(scorer, examples).flatten()
        return torch.from_numpy(scores).float().to(rollouts.device)
