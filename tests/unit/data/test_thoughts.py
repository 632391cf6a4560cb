"""Responses with thoughts, as the chat templates of models write them."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from snakechat.data.chat_templates import TurnsRejected
from snakechat.data.encoder import Encoder
from snakechat.data.formats import columns_of, record_of
from snakechat.data.row_encoding import encode_responses, encode_turns
from snakechat.data.tokenizers import load_tokenizer
from support.chat_templates import CHATML, OSS_THOUGHTS, QWEN_THOUGHTS, R1_THOUGHTS
from support.encoding import encode_pair

SETTINGS = SimpleNamespace(max_length=10_000)
# A template, its special tokens, and the one that ends a turn.
FAMILIES = {
    "qwen3": (QWEN_THOUGHTS, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "r1": (R1_THOUGHTS, ["<|user|>", "<|assistant|>", "</s>"], "</s>"),
    "gpt-oss": (
        OSS_THOUGHTS,
        ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"],
        "<|return|>",
    ),
}


def family(trained, name):
    template, special, end = FAMILIES[name]
    backend = Tokenizer.from_str(trained.backend_tokenizer.to_str())
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=end, pad_token="<pad>"
    )
    tokenizer.chat_template = template
    return tokenizer


def response(text, thoughts=None):
    found = {"role": "assistant", "content": text}
    return {**found, "reasoning_content": thoughts} if thoughts else found


def question(text):
    return {"role": "user", "content": text}


DIALOGUE = [question("Hu"), response("yes", "so"), question("man"), response("no", "or\n\nnot")]


def record(messages):
    prompt, chosen, _ = record_of({"messages": messages}, "messages", columns_of("messages"))
    return prompt, chosen


def rendered(tokenizer, messages):
    """The ids of messages as transformers renders them."""
    return list(tokenizer.apply_chat_template(messages, return_dict=False))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("length", [2, 4])
def test_the_last_response_with_thoughts_is_that_of_the_template(trained, name, length):
    tokenizer = family(trained, name)
    messages = DIALOGUE[:length]
    prompt, ids = encode_pair(Encoder(tokenizer, "chat"), *record(messages))
    whole = rendered(tokenizer, messages)
    assert whole[: len(prompt) + len(ids)] == [*prompt, *ids]
    assert not tokenizer.decode(whole[len(prompt) + len(ids) :]).strip()
    # The model starts from the prompt of the template.
    before = tokenizer.apply_chat_template(
        messages[:-1], add_generation_prompt=True, return_dict=False
    )
    assert prompt == before
    assert messages[-1]["reasoning_content"] in tokenizer.decode(ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_turn_with_thoughts_is_that_of_the_template(trained, name):
    tokenizer = family(trained, name)
    encoder = Encoder(tokenizer, "chat")
    prompt, chosen = record(DIALOGUE)
    [rows] = encode_turns(encoder, SETTINGS, [prompt], [chosen])
    # The templates drop thoughts of earlier turns: each turn is a row of its own.
    assert len(rows) == 2
    for (before, ids, trained_ids, *_), length in zip(rows, (2, 4), strict=True):
        whole = rendered(tokenizer, DIALOGUE[:length])
        assert whole[: len(before) + len(ids)] == [*before, *ids]
        assert trained_ids == [1] * len(ids)


def test_turns_whose_thoughts_the_template_keeps_share_a_row(chat_tokenizer):
    template = CHATML.replace(
        "{{ message.content }}",
        "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>"
        "{% endif %}{{ message.content }}",
    )
    tokenizer = chat_tokenizer(template)
    [[(prompt, ids, trained_ids, *_)]] = encode_turns(
        Encoder(tokenizer, "chat"), SETTINGS, *([each] for each in record(DIALOGUE))
    )
    whole = rendered(tokenizer, DIALOGUE)
    assert whole[: len(prompt) + len(ids)] == [*prompt, *ids]
    learned = [token for token, mark in zip(ids, trained_ids, strict=True) if mark]
    assert tokenizer.decode(learned) == (
        "<think>so</think>yes<|im_end|><think>or\n\nnot</think>no<|im_end|>"
    )


def test_a_template_that_leaves_out_thoughts_rejects_the_row(chat_tokenizer):
    encoder = Encoder(chat_tokenizer(), "chat")
    for encode in (encode_responses, encode_turns):
        [error] = encode(encoder, SETTINGS, *([each] for each in record(DIALOGUE)))
        assert isinstance(error, TurnsRejected)
        assert "does not write the reasoning_content of a response" in str(error)


def test_a_response_without_thoughts_to_a_prompt_that_starts_them_rejects_the_row(trained):
    encoder = Encoder(family(trained, "r1"), "chat")
    with pytest.raises(TurnsRejected, match="the chat template renders a dialogue as") as error:
        encode_pair(encoder, *record([question("Hu"), response("yes")]))
    assert "<think>" in str(error.value)


# Behind a prompt that ends in <think>.
STARTED = CHATML.replace("assistant\n{%", "assistant\n<think>\n{%")
KEPT = STARTED.replace(
    "{{ message.content }}",
    "{{ '<think>\n' if message.role == 'assistant' and '</think>' not in message.content }}"
    "{{ message.content }}",
)
DOUBLED = STARTED.replace(
    "{{ message.content }}",
    "{{ '<think>\n' if message.role == 'assistant' }}{{ message.content }}",
)


def test_thoughts_that_a_prompt_starts_are_trained_once(chat_tokenizer):
    content = "<think>\nso\n</think>\n\nyes"
    tokenizer = chat_tokenizer(KEPT)
    prompt, ids = encode_pair(Encoder(tokenizer, "chat"), [("user", "Hu")], f" {content}")
    assert tokenizer.decode([*prompt, *ids]).count("<think>") == 1
    assert tokenizer.decode(ids) == "so\n</think>\n\nyes<|im_end|>"
    for template in (DOUBLED, STARTED.replace("<think>", "<think>\n<think>")):
        with pytest.raises(TurnsRejected):
            encode_pair(Encoder(chat_tokenizer(template), "chat"), [("user", "Hu")], f" {content}")


def test_thoughts_inside_of_the_content_are_those_of_the_template(trained):
    tokenizer = family(trained, "qwen3")
    content = "<think>\nso\n</think>\n\nyes"
    encoder = Encoder(tokenizer, "chat")
    _, ids = encode_pair(encoder, [("user", "Hu")], f" {content}")
    assert tokenizer.decode(ids) == f"{content}<|im_end|>"
    # A template that keeps the text behind the last thought loses the first one.
    with pytest.raises(TurnsRejected, match="does not write the content of a response"):
        encode_pair(encoder, [("user", "Hu")], " a</think>b</think>c")


def test_real_dialogues_have_the_ids_of_the_template(shared_data):
    tokenizer = load_tokenizer(shared_data / "tokenizers/qwen3")
    encoder = Encoder(tokenizer, "chat")
    for text in ["这是什么", "`code`\n\n- a\n- b", "  spaces  ", "é🙂 1234567", "\n\nline\n"]:
        messages = [question(text), response(text + "!", text.strip() + "?")]
        prompt, ids = encode_pair(encoder, *record(messages))
        whole = rendered(tokenizer, messages)
        assert whole[: len(prompt) + len(ids)] == [*prompt, *ids]
