"""Chat models for tests, and models that generate a given text."""

import copy

import pytest

from conftest import INIT
from snakechat.data.dialogues import chat_template
from snakechat.evaluation.chat_session import load
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from support.chat_templates import CHATML

# Seed, temperature, maximum number of tokens.
GREEDY = (1, 0, 40)
# Positions for several turns, and weights large enough for responses to depend on the prompt.
CHAT_INIT = {**INIT, "max_position_embeddings": 128, "init_std": 0.2}


def as_chatml(tokenizer):
    """A copy of a tokenizer with ChatML, and <|im_end|> as its eos."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", CHATML
    return tokenizer


@pytest.fixture(name="folders")
def chat_folders(tokenizer, tmp_path):
    """Folders of two models with the dialogue template and of one with ChatML, by name."""
    dialogue = copy.deepcopy(tokenizer)
    dialogue.chat_template = chat_template(dialogue)
    tokenizers = {"rlhf": dialogue, "sft": dialogue, "chatml": as_chatml(tokenizer)}
    for seed, (name, each) in enumerate(tokenizers.items()):
        save_model(make_causal(CHAT_INIT, each, seed), each, tmp_path / name)
    return {name: tmp_path / name for name in tokenizers}


@pytest.fixture(name="dialogue")
def dialogue_session(folders):
    """A session with the dialogue template."""
    return load(folders["rlhf"])


def script_response(session, text, ended=True):
    """Make the model of a session generate a text, whatever the prompt is; return its token ids."""
    tokenizer = session.tokenizer
    ids = tokenizer(text, add_special_tokens=False).input_ids
    ids += [tokenizer.eos_token_id] * ended
    script_ids(session.model, ids)
    return ids


def script_ids(model, ids):
    """Make a model generate token ids, over and over; return the hook, a context manager."""
    remaining = []

    def hook(model, inputs, outputs):
        if not remaining:
            remaining.extend(ids)
        outputs.logits[:, -1] = -100
        outputs.logits[:, -1, remaining.pop(0)] = 100

    return model.register_forward_hook(hook)


def pieces_of_response(session, prompt="Why?", settings=GREEDY):
    """The pieces of text of a response."""
    ids, _ = session.encode(prompt, settings[2])
    pieces = []
    response = session.respond(prompt, ids, *settings, pieces.append)
    assert "".join(pieces) == response
    return pieces
