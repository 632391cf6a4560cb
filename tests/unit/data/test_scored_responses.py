"""The records that are selected from scored responses."""

import pytest

from select_responses import select_record

# The best response did not end; of two equal ones, the first is taken.
SCORED = {
    "prompt": [("user", "Why?")],
    "responses": ["So.", " Because.", "No", "Never.", "Not."],
    "ended": [True, True, False, True, True],
    "scores": [2.0, 2.0, 9.0, -1.0, -1.0],
}


def test_the_best_and_the_worst_response_that_ended_are_selected():
    assert select_record(SCORED, "best", None, 0.0) == (SCORED["prompt"], " So.", None)
    pair = select_record(SCORED, "best_and_worst", 2.0, 3.0)
    assert pair == (SCORED["prompt"], " So.", " Never.")


@pytest.mark.parametrize(
    ("scored", "select", "min_score", "min_margin", "reason"),
    [
        (SCORED, "best", 2.5, 0.0, "score below min_score"),
        (SCORED, "best_and_worst", None, 3.5, "difference of scores below min_margin"),
        (SCORED | {"scores": [1.0] * 5}, "best_and_worst", None, 0.0, "equal scores"),
        (SCORED | {"ended": [False] * 5}, "best", None, 0.0, "no response ended"),
    ],
)
def test_other_prompts_are_dropped(scored, select, min_score, min_margin, reason):
    assert select_record(scored, select, min_score, min_margin) == reason
