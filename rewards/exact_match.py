"""Reward 1 for a response that is the text of `solution`, 0 for any other.

Whitespace is compared as single spaces, without that at the ends. Rows without a solution give 0.
"""

from collections.abc import Sequence


def score(
    prompts: Sequence[str],
    responses: Sequence[str],
    solution: Sequence[str | None],
    ignore_case: bool = False,
) -> list[float]:
    """Return one score for each response."""

    def normalized(text: str) -> str:
        text = " ".join(str(text).split())
        return text.casefold() if ignore_case else text

    return [
        float(expected is not None and normalized(response) == normalized(expected))
        for response, expected in zip(responses, solution, strict=True)
    ]
