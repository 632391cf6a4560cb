"""Rows that exceed the maximum length keep their last user turn."""

import pytest

from snakechat.data.dialogues import UNMARKED
from snakechat.data.row_encoding import fitting_turns


class CountingEncoder:
    """Encode a prompt to bos, a marker and the letters of each turn, and a header."""

    def prompts(self, prompts):
        return [
            [0, *(ord(letter) for role, text in turns for letter in role[0].upper() + text), 1]
            for turns in prompts
        ]


SYSTEM = ("system", "sss")
TURNS = [("user", "aa"), ("assistant", "bbbb"), ("user", "cc"), ("assistant", "d"), ("user", "ee")]


@pytest.mark.parametrize(
    ("turns", "limit", "kept"),
    [
        # 2 + 3 + 5 + 3 + 2 + 3 = 18 tokens of prompt, 4 of response.
        (TURNS, 22, TURNS),
        (TURNS, 21, TURNS[2:]),
        # 2 + 3 + 2 + 3 = 10 tokens of prompt.
        (TURNS, 14, TURNS[2:]),
        (TURNS, 13, TURNS[4:]),
        # 5 tokens of prompt: the response loses its end.
        (TURNS, 6, TURNS[4:]),
        (TURNS, 5, None),
        # The system turn has 4 tokens and stays.
        ([SYSTEM, *TURNS], 25, [SYSTEM, *TURNS[2:]]),
        ([SYSTEM, *TURNS], 10, [SYSTEM, *TURNS[4:]]),
        # It is left out where it leaves no room for a response.
        ([SYSTEM, *TURNS], 9, TURNS[4:]),
        # A prompt without some turns starts with a turn of the user.
        ([("assistant", "Hi."), *TURNS], 24, TURNS),
        # A prompt may end with a turn of the assistant.
        (TURNS[:4], 11, TURNS[2:4]),
        # Without a user turn, or without turns, a prompt is kept whole or not at all.
        ([SYSTEM], 7, [SYSTEM]),
        ([SYSTEM], 6, None),
        ([(UNMARKED, "text")], 8, [(UNMARKED, "text")]),
    ],
)
def test_older_turns_are_left_out_before_the_end_of_a_response_of_four_tokens(turns, limit, kept):
    assert fitting_turns(CountingEncoder(), turns, 4, limit) == kept
