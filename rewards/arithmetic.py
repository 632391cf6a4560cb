"""Reward 1 for a response that ends with the result of the prompt's sum or product, 0 for others.

The question is the last "a + b" or "a * b" of the prompt.
"""

import re
from collections.abc import Sequence

QUESTION = re.compile(r"(\d+) ([+*]) (\d+)")
# The last number of a response, with nothing but punctuation and spaces after it.
FINAL_NUMBER = re.compile(r"(\d+)\W*$")


def score(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Return one score for each response."""
    return [
        float(is_correct(prompt, response))
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def is_correct(prompt: str, response: str) -> bool:
    """Return whether a response ends with the result of the question in its prompt.

    Raises:
        ValueError: The prompt has no question.
    """
    questions = QUESTION.findall(prompt)
    if not questions:
        raise ValueError(f"no question such as 3 + 4 in the prompt {prompt!r}")
    first, operator, second = questions[-1]
    result = int(first) + int(second) if operator == "+" else int(first) * int(second)
    number = FINAL_NUMBER.search(response)
    return number is not None and int(number[1]) == result
