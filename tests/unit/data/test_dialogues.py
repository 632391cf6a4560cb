"""Dialogues as text, and back."""

import pyarrow.parquet as pq
import pytest
from tokenizers import normalizers, pre_tokenizers

from snakechat.data.dialogues import chat_template, parse_turns, render_prompt, render_response
from support import family_tokenizers
from support.dialogues import DIALOGUES


@pytest.mark.parametrize("name", DIALOGUES)
def test_turns_and_prompts_convert_both_ways(name):
    turns, prompt = DIALOGUES[name]
    assert render_prompt(turns) == prompt
    assert parse_turns(prompt) == turns


def test_whitespace_around_a_turn_is_stripped():
    assert render_prompt([("user", "  Can you\n help?\n\n")]) == (
        "\n\nHuman: Can you\n help?\n\nAssistant:"
    )


@pytest.mark.parametrize(
    ("text", "response"),
    [("Yes.", " Yes."), (" Yes.\n", " Yes."), ("", " "), (" \n", " "), ("a\n\nb", " a\n\nb")],
)
def test_response_starts_with_one_space(text, response):
    assert render_response(text) == response


@pytest.mark.parametrize("breaks", ["\n\n", "\n\n\n", "\n\n\n\n", "\n\n\n\n\n"])
@pytest.mark.parametrize("name", ["Human", "Assistant", "System"])
def test_marker_inside_a_text_starts_no_turn(name, breaks):
    text = f"I read:{breaks}{name}: Hello!"
    (role, kept), *others = parse_turns(render_prompt([("user", text)]))
    assert (role, others) == ("user", [])
    # Nothing but a line break is lost.
    assert kept.split() == text.split()
    assert parse_turns(f"\n\nHuman: Read.\n\nAssistant:{render_response(text)}")[1:] == [
        ("assistant", kept)
    ]


def test_several_markers_inside_a_text_start_no_turn():
    text = "a\n\nHuman: b\n\nAssistant: c\n\nHuman:\n\nHuman: d"
    assert render_prompt([("user", text)]) == (
        "\n\nHuman: a\nHuman: b\nAssistant: c\nHuman:\nHuman: d\n\nAssistant:"
    )


def test_marker_at_the_start_of_a_text_starts_no_turn():
    assert parse_turns(render_prompt([("user", "\n\nHuman: Hello!")])) == [
        ("user", "Human: Hello!")
    ]


@pytest.mark.parametrize("text", ["Name a fruit.", "\nName a fruit.\n", "Name a fruit.\n\n"])
def test_a_text_without_markers_is_one_turn_of_the_user(text):
    assert parse_turns(text) == [("user", "Name a fruit.")]


def test_text_before_the_first_marker_is_a_user_turn():
    assert parse_turns("Hello.\n\nAssistant: Hi.\n\nHuman: Name a fruit.\n\nAssistant:") == [
        ("user", "Hello."),
        ("assistant", "Hi."),
        ("user", "Name a fruit."),
    ]


@pytest.mark.parametrize("text", ["", "\n\nAssistant:", " \n\nAssistant: "])
def test_empty_prompt_has_no_turns(text):
    assert parse_turns(text) == []


def test_prompt_may_end_without_an_assistant_marker():
    assert parse_turns("\n\nHuman: Hello.") == [("user", "Hello.")]
    assert parse_turns("\n\nHuman: Hello.\n\nAssistant: Hi.") == [
        ("user", "Hello."),
        ("assistant", "Hi."),
    ]


def test_spaces_after_markers_do_not_matter():
    # Some sets have none, or two.
    assert parse_turns("\n\nHuman:Hello.\n\nAssistant:  Hi.\n\nHuman: Why?\n\nAssistant: ") == [
        ("user", "Hello."),
        ("assistant", "Hi."),
        ("user", "Why?"),
    ]


def metaspace():
    """A tokenizer that starts a text, but not text behind bos, with a space (Llama 2's)."""
    tokenizer = family_tokenizers.mistral()
    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


MAKERS = [metaspace, *(getattr(family_tokenizers, name) for name in ("mistral", "gemma", "gpt2"))]


@pytest.mark.parametrize("make", MAKERS)
def test_the_chat_template_gives_the_ids_of_the_prompt(make):
    tokenizer = make()
    tokenizer.chat_template = chat_template(tokenizer)
    messages = [{"role": "user", "content": "How do I boil an egg?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = render_prompt([("user", "How do I boil an egg?")])
    expected = tokenizer(prompt).input_ids
    assert tokenizer(text, add_special_tokens=False).input_ids == expected


def test_real_prompts_are_reproduced_from_their_turns(shared_data):
    # Space around a turn is all that differs.
    for name in ("hh_harmless", "dpo_demo_en", "dpo_demo_zh"):
        table = pq.read_table(shared_data / name / "test.parquet", columns=["prompt"])
        for prompt in table["prompt"].to_pylist():
            turns = parse_turns(prompt)
            assert turns[-1][0] == "user"
            again = render_prompt(turns)
            assert parse_turns(again) == turns
            assert again.split() == prompt.split()
