"""Records from texts."""

from snakechat.data.dialogues import parse_prompt


def make_record(prompt, chosen=None, rejected=None):
    """Return the record of a prompt in which markers mark turns."""
    return parse_prompt(prompt), chosen, rejected
