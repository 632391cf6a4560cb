"""Reward 1 for a response that a regular expression matches as a whole, 0 for any other.

The response is matched without the whitespace at its ends, and a dot matches newlines too:
`pattern: "<think>.*</think>.*"`.
"""

import re
from collections.abc import Sequence

from snakechat.evaluation.sandbox import is_verified


def score(prompts: Sequence[str], responses: Sequence[str], pattern: str) -> list[float]:
    """Return one score for each response."""
    compiled = re.compile(pattern, re.DOTALL)

    def has_format(response: str) -> bool:
        return compiled.fullmatch(response.strip()) is not None

    return [float(is_verified(has_format, response)) for response in responses]
