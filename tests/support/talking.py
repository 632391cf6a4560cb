"""Tokenizers with ChatML, and models that generate given tokens."""

import copy

from support.chat_templates import CHATML


def as_chatml(tokenizer):
    """A copy of a tokenizer with ChatML, and <|im_end|> as its eos."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", CHATML
    return tokenizer


def script_ids(model, ids):
    """Make a model generate token ids, over and over; return the hook, a context manager."""
    remaining = []

    def hook(model, inputs, outputs):
        if not remaining:
            remaining.extend(ids)
        outputs.logits[:, -1] = -100
        outputs.logits[:, -1, remaining.pop(0)] = 100

    return model.register_forward_hook(hook)
