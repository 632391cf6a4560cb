"""Reward 1 for a correct response of the toy task, 0 for any other."""

from collections.abc import Sequence

from snakechat.data.toy import is_correct


def score(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Return one score for each response."""
    return [
        float(is_correct(prompt, response))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
