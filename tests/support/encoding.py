"""Records from texts, and ids of single prompts and responses."""

from snakechat.data.dialogues import parse_prompt
from snakechat.data.encoder import accepted


def make_record(prompt, chosen=None, rejected=None):
    """Return the record of a prompt in which markers mark turns."""
    return parse_prompt(prompt), chosen, rejected


def encode_pair(encoder, prompt, response):
    """The ids of a prompt and of its response."""
    [(ids, [response_ids])] = accepted(encoder.conversations([(prompt, [response])]))
    return ids, response_ids


def encode_response(encoder, response, prompt=(("user", "no"),)):
    """The ids of a response."""
    return encode_pair(encoder, list(prompt), response)[1]
