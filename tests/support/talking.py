"""Models to talk to, and what has them say a text."""

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from conftest import INIT
from snakechat.data.dialogues import chat_template
from snakechat.modeling.models import make_causal, save_model

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
# Seed, temperature, most tokens of a response.
GREEDY, SAMPLED = (1, 0, 40), (1, 1, 10)
# With room for some turns, and weights under which these matter.
LONGER = {**INIT, "max_position_embeddings": 128, "init_std": 0.2}


def as_chat(tokenizer):
    """A copy of a tokenizer with ChatML, and <|im_end|> as its eos."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="<|im_end|>",
        chat_template=CHATML,
    )


def make_folders(tokenizer, place):
    """Folders of two models in the Human/Assistant form, of other weights, and one in ChatML."""
    dialogue = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()),
        **tokenizer.special_tokens_map,
    )
    dialogue.chat_template = chat_template(dialogue)
    kinds = {"rlhf": dialogue, "sft": dialogue, "chatml": as_chat(tokenizer)}
    for number, (name, kind) in enumerate(kinds.items()):
        save_model(make_causal(LONGER, kind, number), kind, place / name)
    return {name: place / name for name in kinds}


def say(conversation, text, ended=True):
    """Have a conversation's model write a text, whatever it is asked; returns its token ids."""
    tokenizer = conversation.tokenizer
    ids = tokenizer(text, add_special_tokens=False).input_ids
    ids += [tokenizer.eos_token_id] * ended
    script = []

    def hook(model, inputs, outputs):
        if not script:
            script.extend(ids)
        outputs.logits[:, -1] = -100
        outputs.logits[:, -1, script.pop(0)] = 100

    conversation.model.register_forward_hook(hook)
    return ids


def ask(conversation, question="Why?", settings=GREEDY):
    """The pieces of a response."""
    ids, _ = conversation.make_room(question, settings[2])
    pieces = []
    response = conversation.response(question, ids, *settings, pieces.append)
    assert "".join(pieces) == response
    return pieces
