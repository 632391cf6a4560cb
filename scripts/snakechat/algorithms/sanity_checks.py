"""Checks that stop RLHF early: degenerate rollouts, and updates of another policy."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from snakechat.algorithms.rollouts import Rollouts
from snakechat.workflow.errors import InputError

# Allowed deviation of the mean ratio from 1 and of the mean KL from 0 in the first update of a
# step. Rounding alone causes less.
FIRST_UPDATE_TOLERANCE = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05}
# Number of responses after which reward functions that have returned a single score are considered
# useless. Before, sparse rewards may have found no success yet.
MAX_EQUAL_SCORES = 1000
# Number of consecutive responses without eos after which the actor is considered unable to end.
MAX_UNENDED = 500


class ResponseCheck:
    """Checks the responses of each step; counts consecutive responses without eos."""

    def __init__(self) -> None:
        self.num_unended = 0

    def check(self, rollouts: Rollouts, step: int) -> None:
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
        if rollouts.ended.any():
            self.num_unended = 0
            return
        self.num_unended += number
        if self.num_unended >= MAX_UNENDED:
            raise InputError(
                f"step {step}: none of the last {self.num_unended} responses ended within"
                " max_response_length tokens: increase it, or train sft on responses that are not"
                " truncated"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"num_unended": self.num_unended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_unended = state["num_unended"]


class ScoreCheck:
    """Checks that scores differ; counts responses until they do.

    has_rewards: Whether reward models score, whose scores always differ.
    """

    def __init__(self, has_rewards: bool) -> None:
        self.max_equal = 1 if has_rewards else MAX_EQUAL_SCORES
        # Responses with the same score, or none, since the first step; -1 after two different
        # scores.
        self.num_equal = 0
        self.score: float | None = None

    def check(self, scores: Tensor, step: int) -> None:
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

    def state_dict(self) -> dict[str, Any]:
        return {"num_equal": self.num_equal, "score": self.score}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_equal, self.score = state["num_equal"], state["score"]


def check_first_update(metrics: Mapping[str, float], dtype: str, step: int) -> None:
    """Check that the first update of a step starts from the policy that sampled the responses.

    metrics: of that update, in which the ratio is 1 and the KL 0 except for rounding.

    Raises:
        InputError: One of them differs by more than FIRST_UPDATE_TOLERANCE.
    """
    ratio, kl = metrics["policy/ratio"], metrics["policy/approxkl"]
    tolerance = FIRST_UPDATE_TOLERANCE[dtype]
    if not (abs(ratio - 1) < tolerance and kl < tolerance):
        raise InputError(
            f"step {step}: before the first update the ratio of the policy to itself is"
            f" {ratio:.4g} and its KL {kl:.4g}, expected 1 and 0 within {tolerance:g}: training and"
            " evaluation mode of this model compute different log-probabilities"
        )
