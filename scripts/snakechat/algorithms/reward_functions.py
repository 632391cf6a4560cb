"""Reward functions: programs of the user, rewards/NAME.py, that score responses.

Each program defines score(prompts, responses), which takes two lists of texts without special
tokens and returns one number for each response.
"""

import math
import traceback
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from snakechat.workflow.errors import InputError

FOLDER = Path(__file__).resolve().parents[3] / "rewards"
# Characters of a text that an error message quotes.
MAX_QUOTED = 60


class RewardFunctions:
    """The weighted sum of reward functions. weights: {NAME: weight}."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.functions = [(weight, RewardFunction(name)) for name, weight in weights.items()]

    def __call__(self, prompts: list[str], responses: list[str]) -> np.ndarray:
        """Return the score of each response, float64 [n]; zeros if there are no functions."""
        scores = np.zeros(len(responses))
        for weight, function in self.functions:
            scores += weight * function(prompts, responses)
        return scores


class RewardFunction:
    """The function score of rewards/NAME.py.

    Raises:
        InputError: The program cannot be run, defines no score, or score raises or returns
            anything but a finite number for each response.
    """

    def __init__(self, name: str) -> None:
        self.path = FOLDER / f"{name}.py"
        # Not imported: an import could find another module of that name, or stale bytecode.
        module: dict[str, Any] = {"__name__": f"rewards.{name}", "__file__": str(self.path)}
        try:
            exec(compile(self.path.read_text(), self.path, "exec"), module)
        except Exception as error:
            raise self._exception_error(error) from error
        if "score" not in module:
            raise self._error("has no function score(prompts, responses)")
        self.score: Callable[[list[str], list[str]], Any] = module["score"]

    def __call__(self, prompts: list[str], responses: list[str]) -> np.ndarray:
        """Return the score of each response, float64 [n]."""
        try:
            scores = self.score(prompts, responses)
        except Exception as error:
            raise self._exception_error(error) from error
        # Converts arrays and tensors on any device to Python numbers.
        scores = scores.tolist() if hasattr(scores, "tolist") else scores
        if not isinstance(scores, (list, tuple)):
            raise self._error(
                f"score returned {shorten(repr(scores))}, expected a number for each of"
                f" {len(responses)} responses"
            )
        if len(scores) != len(responses):
            raise self._error(
                f"score returned {len(scores)} numbers for {len(responses)} responses"
            )
        for score, response in zip(scores, responses, strict=True):
            if not isinstance(score, (Real, np.bool_)) or not math.isfinite(score):
                raise self._error(
                    f"score returned {shorten(repr(score))} for the response"
                    f" {shorten(response)!r}, expected a finite number"
                )
        return np.array(scores, dtype=np.float64)

    def _error(self, message: str) -> InputError:
        return InputError(f"rewards/{self.path.name}: {message}")

    def _exception_error(self, error: Exception) -> InputError:
        """Return the error for an exception of the program, with the program's innermost line."""
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == str(self.path)
        ]
        place = f"line {lines[-1]}: " if lines else ""
        return self._error(f"{place}{type(error).__name__}: {shorten(str(error))}")


def shorten(text: str) -> str:
    """Return the start of a text, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}…"
