"""Ids of single prompts and responses."""

from snakechat.data.encoder import accepted


def encode_pair(encoder, prompt, response):
    """The ids of a prompt and of its response."""
    [(ids, [response_ids])] = accepted(encoder.conversations([prompt], [response]))
    return ids, response_ids


def encode_response(encoder, response, prompt=(("user", "no"),)):
    """The ids of a response."""
    return encode_pair(encoder, list(prompt), response)[1]
