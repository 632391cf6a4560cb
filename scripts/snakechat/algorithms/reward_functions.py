"""Reward functions: responses scored by programs of the user, rewards/NAME.py.

Each has a function score(prompts, responses) of two lists of texts, without special tokens, that
gives one number for each response.
"""

import math
import traceback
from numbers import Real
from pathlib import Path

import numpy as np

from snakechat.workflow.errors import InputError

FOLDER = Path(__file__).resolve().parents[3] / "rewards"
# So many characters of a text are told.
SHOWN = 60


class RewardFunctions:
    """The weighted sum of some reward functions. weights: {NAME: weight}."""

    def __init__(self, weights):
        self.functions = [(weight, RewardFunction(name)) for name, weight in weights.items()]

    def __call__(self, prompts, responses):
        """Score of each response: numpy [n], float64; 0 where there are no functions."""
        scores = np.zeros(len(responses))
        for weight, function in self.functions:
            scores += weight * function(prompts, responses)
        return scores


class RewardFunction:
    """rewards/NAME.py. Raises InputError where that is no such program, or fails."""

    def __init__(self, name):
        self.path = FOLDER / f"{name}.py"
        # Not by import, which could find another module of that name, or old bytecode.
        module = {"__name__": f"rewards.{name}", "__file__": str(self.path)}
        try:
            exec(compile(self.path.read_text(), self.path, "exec"), module)
        except Exception as error:
            raise self.told(error) from error
        if "score" not in module:
            raise self.wrong("has no function score(prompts, responses)")
        self.score = module["score"]

    def __call__(self, prompts, responses):
        """Score of each response: numpy [n], float64."""
        try:
            scores = self.score(prompts, responses)
        except Exception as error:
            raise self.told(error) from error
        # Arrays and tensors, on whatever device, become plain numbers.
        scores = scores.tolist() if hasattr(scores, "tolist") else scores
        if not isinstance(scores, (list, tuple)):
            raise self.wrong(
                f"score gave {shortened(repr(scores))}, expected a number for each of"
                f" {len(responses)} responses"
            )
        if len(scores) != len(responses):
            raise self.wrong(f"score gave {len(scores)} numbers for {len(responses)} responses")
        for score, response in zip(scores, responses, strict=True):
            if not isinstance(score, (Real, np.bool_)) or not math.isfinite(score):
                raise self.wrong(
                    f"score gave {shortened(repr(score))} for the response"
                    f" {shortened(response)!r}, expected a finite number"
                )
        return np.array(scores, dtype=np.float64)

    def wrong(self, what):
        """The error of what is wrong with the program."""
        return InputError(f"rewards/{self.path.name}: {what}")

    def told(self, error):
        """The error of what the program raised, with the last of its own lines behind it."""
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(self.path)
        ]
        where = f"line {lines[-1]}: " if lines else ""
        return self.wrong(f"{where}{type(error).__name__}: {shortened(str(error))}")


def shortened(text):
    """The start of a text, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
