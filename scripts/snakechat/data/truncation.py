"""Truncation of rows that exceed the maximum length.

A row keeps its last user turn whole. What does not fit is left out in this order: older turns, from
the first one and as far as the next user turn, so that roles alternate as before; then the end of
the response, with the token that ends it. The system turn and the tools stay. They are left out
only where they and the last user turn leave no room for a response.
"""

from collections.abc import Sequence

from snakechat.data.dialogues import TOOLS, UNMARKED, Turn
from snakechat.data.encoder import Encoder


def fitting_prompt(
    encoder: Encoder, turns: Sequence[Turn], response_length: int, limit: int
) -> list[int] | None:
    """Return the ids of the longest prompt that fits; None if none leaves room for a response.

    Args:
        turns: The turns of the whole prompt, which does not fit.
        response_length: Number of tokens of the response, or of the longer one of a pair.
        limit: Maximum number of tokens of prompt and response.
    """
    start, starts = divide_turns(turns)
    system = list(turns[:start])
    prompt = encoder.prompts([list(turns[starts[-1] :])])[0]
    if len(prompt) >= limit:
        return None
    # From the newest turns to the oldest ones: no prompt is much longer than the limit.
    for first in reversed(starts):
        [ids] = encoder.prompts([[*system, *turns[first:]]])
        room_needed = 1 if first == starts[-1] else response_length
        if len(ids) + room_needed > limit:
            break
        prompt = ids
    return prompt


def divide_turns(turns: Sequence[Turn]) -> tuple[int, list[int]]:
    """Return the number of system turns and tools at the start, and where others may start."""
    roles = [role for role, _ in turns]
    fixed = ("system", TOOLS)
    num_system = next((n for n, role in enumerate(roles) if role not in fixed), len(roles))
    starts = [n for n in range(num_system, len(roles)) if roles[n] in ("user", UNMARKED)]
    # Without a user turn, the prompt is a whole.
    return (num_system, starts) if starts else (0, [0])
