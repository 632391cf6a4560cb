"""Scores of responses: by the reward model and by functions, in units that can be learnt from.

Shapes: B responses, as in snakechat/algorithms/rollouts.py.
"""

import math

import torch

from snakechat.algorithms import ppo
from snakechat.workflow.distributed import rank, total
from snakechat.workflow.errors import InputError


class Standardizer:
    """The units that scores are told in: deviations from the mean of those that were added, and
    raw ones before any were.
    """

    def __init__(self):
        self.moments = None

    def __call__(self, scores):
        if self.moments is None:
            return scores
        count, mean, squares = self.moments
        return (scores - mean) / math.sqrt(squares / count)

    def add(self, scores):
        """Count scores in. The first ones must not be all the same."""
        moments = ppo.moments(scores)
        self.moments = ppo.merged_moments(self.moments, moments) if self.moments else moments


class Scoring:
    """What responses are worth.

    reward: a Frozen reward model, or None. critic_units: those in which a critic speaks that starts
    as the reward model: the first that there were.
    """

    def __init__(self, settings, reward, functions):
        self.settings, self.reward, self.functions = settings, reward, functions
        self.units, self.critic_units = Standardizer(), Standardizer()

    def scores(self, rollouts, step, rows):
        """The score of each response [B]: the reward model's, and the weighted sum of functions.

        Raises InputError for one that is no number, and where the first step's are all the same.
        """
        scores = torch.zeros(len(rollouts.ended), device=rollouts.device)
        if self.reward:
            with self.reward.on_device() as scorer:
                scores += rollouts.scores(scorer)
        if self.settings.reward_functions:
            # Of the first process alone: a function need not say the same twice.
            said = self.functions(*rollouts.texts()) if rank() == 0 else [0.0] * len(scores)
            scores += total(torch.as_tensor(said, dtype=torch.float32)).to(scores.device)
        if not scores.isfinite().all():
            wrong = int(scores.isfinite().logical_not().nonzero()[0])
            raise InputError(
                f"step {step}: the response to row {rows[wrong % len(rows)]} has the score"
                f" {scores[wrong].item()}: scores must be numbers: look at the reward model"
            )
        if step == 1 and scores.min() == scores.max():
            raise InputError(
                f"step {step}: every response has the same score, {scores[0].item():g}: there is"
                " nothing to learn from"
            )
        return scores

    def final(self, scores, ended):
        """Scores [B] to learn from: standardised, clipped, less where a response has not ended."""
        when = self.settings.standardize_scores
        if when == "running" or (when == "first" and self.units.moments is None):
            self.units.add(scores)
            if self.reward and self.critic_units.moments is None:
                self.critic_units.moments = self.units.moments
        clip = self.settings.score_clip
        final = self.units(scores).clamp(-clip, clip)
        return final - self.settings.missing_eos_penalty * ~ended

    def state_dict(self):
        """For a run that is resumed."""
        return {"units": self.units.moments, "critic_units": self.critic_units.moments}

    def load_state_dict(self, state):
        """Put a state back."""
        self.units.moments = state["units"]
        self.critic_units.moments = state["critic_units"]
