r"""Reward 1 for a response with the answer of `solution`, 0 for any other.

The answer of a response is the content of its last \boxed{...} or, without one, its last number.
With `marker`, such as "####", only what follows the last marker counts.
The answer of a solution is in its last \boxed{...}, after #### as in GSM8K, or the whole text.
Numbers are compared as numbers: 1 000, 1e3 and 1000.0 are equal, and so are 2 1/2 and \frac52. A
unit counts if both have one. A comma is decimal where the solution is a fraction. Sets, and lists
without brackets, have no order: 3 or 5 is 5, 3. Rows without a solution give 0.
"""

from collections.abc import Sequence

from snakechat.evaluation.answers import answer_of, are_equal, last_boxed
from snakechat.evaluation.sandbox import is_verified


def score(
    prompts: Sequence[str],
    responses: Sequence[str],
    solution: Sequence[str | None],
    marker: str | None = None,
) -> list[float]:
    """Return one score for each response."""
    return [
        float(expected is not None and is_correct(response, str(expected), marker))
        for response, expected in zip(responses, solution, strict=True)
    ]


def is_correct(response: str, solution: str, marker: str | None = None) -> bool:
    """Return whether the answer of a response equals the answer of a solution."""
    expected = last_boxed(solution) or solution.rpartition("####")[2]

    def has_answer(response: str) -> bool:
        if marker is not None:
            response = response.rpartition(marker)[2] if marker in response else ""
        answer = answer_of(response)
        return answer is not None and are_equal(answer, expected)

    return is_verified(has_answer, response)
