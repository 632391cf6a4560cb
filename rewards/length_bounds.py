"""Reward 1 for a response whose number of characters is within bounds, 0 for any other.

The whitespace at the ends of a response does not count. The bounds themselves are allowed.
"""

import math
from collections.abc import Sequence


def score(
    prompts: Sequence[str],
    responses: Sequence[str],
    min_characters: int = 1,
    max_characters: float = math.inf,
) -> list[float]:
    """Return one score for each response."""
    lengths = [len(response.strip()) for response in responses]
    return [float(min_characters <= length <= max_characters) for length in lengths]
