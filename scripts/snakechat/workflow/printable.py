"""Text from data, models and file names, as it is shown: in messages, logs and pages.

Standard library only: the workflow imports this module while it plans.
"""

import re

# Characters of a message.
MAX_MESSAGE = 2_000

# Control characters (C0 and C1) could move the cursor or start the escape sequences of a terminal.
# Others change the direction of the text around them. Halves of surrogate pairs, as in file names
# that are not UTF-8, cannot be encoded.
CONTROL = r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
# Separators of lines and paragraphs end a line as well.
IN_LINE, IN_TEXT = re.compile(rf"{CONTROL}|[\u2028\u2029]"), re.compile(rf"(?![\t\n]){CONTROL}")


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
