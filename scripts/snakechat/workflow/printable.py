"""Text from data, models and file names, as it is shown: in messages, logs and pages.

Standard library only: the workflow imports this module while it plans.
"""

import re

# Characters of a message.
MAX_MESSAGE = 2_000

# Control characters (C0 and C1), which could move the cursor or start the escape sequences of a
# terminal; those that change the direction of text or end a line; and halves of surrogate pairs,
# which cannot be encoded.
CONTROL = r"\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
IN_LINE, IN_TEXT = re.compile(f"[{CONTROL}]"), re.compile(rf"(?![\t\n])[{CONTROL}]")


def printable_text(text: str) -> str:
    """Return a text with escape sequences of Python in place of control characters.

    Tabs and line feeds stay as they are.
    """
    return IN_TEXT.sub(_escape, text)


def printable_line(text: object, limit: int = MAX_MESSAGE) -> str:
    """Return a message as one line without control characters, shortened in its middle."""
    line = str(text)
    if len(line) > limit:
        half = limit // 2
        line = f"{line[:half]} [{len(line) - 2 * half:,} characters] {line[-half:]}"
    return IN_LINE.sub(_escape, line)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
