"""Dialogues as text, and back."""

import pytest
from tokenizers import normalizers, pre_tokenizers

from snakechat.data.dialogues import (
    UNMARKED,
    chat_template,
    messages_of,
    parse_prompt,
    render_prompt,
)
from support import family_tokenizers

CODE = "    if x:\n        return 1\n"


# Turns, and the prompt that they render to.
@pytest.mark.parametrize(
    ("turns", "prompt"),
    [
        (
            [("system", "请用中文。"), ("user", "天空?"), ("assistant", "蓝。"), ("user", "?")],
            "\n\nSystem: 请用中文。\n\nHuman: 天空?\n\nAssistant: 蓝。\n\nHuman: ?\n\nAssistant:",
        ),
        # A response that is to be continued.
        (
            [("user", "Hello."), ("system", "Be rude."), ("user", ""), ("assistant", "One,")],
            "\n\nHuman: Hello.\n\nSystem: Be rude.\n\nHuman: \n\nAssistant: One,\n\nAssistant:",
        ),
        # Markers within a line or after one line break.
        (
            [("user", "What is Human: for?\nAssistant: a\n\n Human: b")],
            "\n\nHuman: What is Human: for?\nAssistant: a\n\n Human: b\n\nAssistant:",
        ),
        # Without a marker in front.
        ([(UNMARKED, "Hi.\n\nAssistant:")], "Hi.\n\nAssistant:"),
        ([(UNMARKED, "Hi."), ("assistant", "A?")], "Hi.\n\nAssistant: A?\n\nAssistant:"),
    ],
)
def test_turns_and_prompts_convert_both_ways(turns, prompt):
    assert render_prompt(turns) == prompt
    assert parse_prompt(prompt) == turns


def test_a_text_without_a_marker_is_a_message_of_the_user():
    for text, content in (("\nA fruit:\n  ", "\nA fruit:\n  "), ("Hi.\n\nAssistant:", "Hi.")):
        assert messages_of(parse_prompt(text)) == [{"role": "user", "content": content}]


def test_the_definitions_of_tools_are_not_a_message():
    assert messages_of([("tools", "[]"), ("user", "Hi.")]) == [{"role": "user", "content": "Hi."}]


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("\n\nHuman: Hello.", [("user", "Hello.")]),
        ("\n\nHuman: Hello.\n\nAssistant: \n", [("user", "Hello.")]),
        # The space after a marker belongs to it.
        ("\n\nHuman:Hello. \n\nAssistant:  Hi.", [("user", "Hello. "), ("assistant", " Hi.")]),
    ],
)
def test_markers_and_the_space_behind_them_are_no_text(text, turns):
    assert parse_prompt(text) == turns


def metaspace():
    """A tokenizer that starts a text, but not text behind bos, with a space (Llama 2's)."""
    tokenizer = family_tokenizers.mistral()
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


MAKERS = [metaspace, *(getattr(family_tokenizers, name) for name in ("mistral", "gpt2"))]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("question", ["How do I boil an egg?", CODE, "a\n\nHuman: b"])
def test_the_chat_template_gives_the_ids_of_the_prompt(make, question):
    tokenizer = make()
    tokenizer.chat_template = chat_template(tokenizer)
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = tokenizer(render_prompt([("user", question)])).input_ids
    assert tokenizer(text, add_special_tokens=False).input_ids == expected
