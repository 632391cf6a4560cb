"""Dialogues as ids of the model's own chat template: tools, thoughts, all turns, rejections."""

import json
from functools import cache
from itertools import chain, pairwise
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from snakechat.data.chat_templates import TurnsRejected
from snakechat.data.dialogues import UNMARKED, messages_of, response_turn, tools_of
from snakechat.data.encoder import Encoder, accepted
from snakechat.data.formats import columns_of, record_of
from snakechat.data.row_encoding import TOO_LONG, drop_reason, encode_batch, fitting_turns
from support.chat_templates import (
    CHATML,
    CHATML_TOOLS,
    LLAMA,
    OSS_THOUGHTS,
    QWEN_THOUGHTS,
    R1_THOUGHTS,
)
from support.encoding import encode_pair

TOOL = {"name": "weather", "description": "Ask.", "parameters": {"type": "object"}}
CALL = {"name": "weather", "arguments": {"city": "Bern", "days": 2}}
TOOLS = [
    {"from": "human", "value": "Hello."},
    {"from": "gpt", "value": "Hi."},
    {"from": "human", "value": "Will it rain?"},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": '{"rain": true}'},
    {"from": "gpt", "value": "Yes."},
]
THOUGHTS = [
    {"from": "human", "value": "Hu\n\nReally?"},
    {"from": "gpt", "value": "yes", "reasoning_content": "so"},
    {"from": "human", "value": "<b>{{ messages }}</b> {% raw %} é中🙂"},
    {"from": "gpt", "value": "no", "reasoning_content": "or\n\nnot"},
]
# A template, its special tokens, and the one that ends a turn.
FAMILIES = {
    "qwen thoughts": (QWEN_THOUGHTS, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "r1": (R1_THOUGHTS, ["<|user|>", "<|assistant|>", "</s>"], "</s>"),
    "gpt-oss": (
        OSS_THOUGHTS,
        ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"],
        "<|return|>",
    ),
    "chatml": (CHATML_TOOLS, ["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "llama": (LLAMA, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>"),
}
CALLS = {
    "chatml": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
    "llama": '{"name": "weather", "parameters": {"city": "Bern", "days": 2}}',
}
WITHOUT_RESULTS = CHATML_TOOLS.replace("in messages %}", "in messages if message.role != 'tool' %}")


def encode(encoder, prompt, chosen, limit=10_000, train_on="all_turns"):
    """The rows of a record of SFT."""
    settings = SimpleNamespace(max_length=limit, train_on=train_on, unpaired=False)
    settings.fields = ["prompt", "chosen"]
    [rows] = accepted(encode_batch(encoder, settings, {"prompt": [prompt], "chosen": [chosen]}))
    return rows


@pytest.fixture(scope="module")
def family(trained):
    """A function that returns the tokenizer of a family with its chat template."""

    @cache
    def make(name):
        template, special, end = FAMILIES[name]
        backend = Tokenizer.from_str(trained.backend_tokenizer.to_str())
        backend.add_special_tokens(special)
        names = {"bos_token": "<s>", "eos_token": end, "pad_token": "<pad>"}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
        tokenizer.chat_template = template
        return tokenizer

    return make


def record(*messages, tools=()):
    row = {"conversations": list(messages), "tools": json.dumps(tools)}
    prompt, chosen, _ = record_of(row, "sharegpt", columns_of("sharegpt"))
    return prompt, chosen


def rendered(tokenizer, turns, **options):
    """The ids of turns as transformers renders them."""
    options |= {"tools": tools_of(turns), "return_dict": False}
    return list(tokenizer.apply_chat_template(messages_of(turns), **options))


def trained_text(tokenizer, row):
    _, ids, trained, *_ = row
    return tokenizer.decode([token for token, mark in zip(ids, trained, strict=True) if mark])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("end", [2, 4, 6])
def test_a_response_has_the_ids_of_the_templates_own_rendering(family, name, end):
    tokenizer, has_tools = family(name), name in CALLS
    messages = (TOOLS if has_tools else THOUGHTS)[:end]
    prompt, chosen = record(*messages, tools=[TOOL] * has_tools)
    before, response = encode_pair(Encoder(tokenizer, "chat"), prompt, chosen)
    # The model starts from the prompt of the template.
    assert before == rendered(tokenizer, prompt, add_generation_prompt=True)
    whole = [*prompt, response_turn(chosen), *[("user", "Thanks.")] * has_tools]
    ids = [*before, *response]
    assert rendered(tokenizer, whole)[: len(ids)] == ids
    text = tokenizer.decode(response[:-1])
    if has_tools:
        assert text == {6: "Yes.", 4: CALLS[name], 2: "Hi."}[end]
        assert "weather" in tokenizer.decode(before)
    else:
        assert messages[-1]["value"] in text and messages[-1]["reasoning_content"] in text


def test_a_sampled_response_that_a_template_cuts_is_whole(family):
    encoder, turns, text = Encoder(family("r1"), "chat"), [("user", "Why?")], " so</think>\n\nyes"
    [row] = encoder.conversations([(turns, [text])])
    with pytest.raises(TurnsRejected):
        list(accepted([row]))
    [(_, [ids])] = accepted(encoder.conversations([(turns, [text])], sampled=True))
    assert family("r1").decode(ids[:-1]).strip() == text.strip()


@pytest.mark.parametrize("name", CALLS)
def test_all_turns_of_the_assistant_are_trained_and_nothing_else(family, name):
    tokenizer = family(name)
    prompt, chosen = record(*TOOLS, tools=[TOOL])
    encoder = Encoder(tokenizer, "chat")
    [row] = encode(encoder, prompt, chosen)
    first, ids, trained, lengths, cut = row
    whole = [*first, *ids]
    turns = [*prompt, response_turn(chosen), ("user", "Thanks.")]
    assert rendered(tokenizer, turns)[: len(whole)] == whole
    assert lengths == [len(ids)] == [len(trained)] and cut == ""
    end = tokenizer.decode([encoder.end_id])
    assert trained_text(tokenizer, row) == f"Hi.{end}{CALLS[name]}{end}Yes.{end}"


def test_each_turn_of_a_dialogue_is_encoded_once(family, monkeypatch):
    """Time would otherwise grow with the square of the number of turns."""
    encoder, encoded = Encoder(family("chatml"), "chat"), []
    prompt, chosen = record(
        *[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}] * 40
    )
    ids_of = encoder._ids
    monkeypatch.setattr(encoder, "_ids", lambda texts: encoded.extend(texts) or ids_of(texts))
    [row] = encode(encoder, prompt, chosen)
    assert trained_text(encoder.tokenizer, row) == "Ho<|im_end|>" * 40
    assert sum(map(len, encoded)) < 3 * len(encoder.writer.prompt(prompt))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in CALLS])
def test_a_turn_whose_thoughts_the_template_drops_later_is_a_row_of_its_own(family, name):
    tokenizer = family(name)
    prompt, chosen = record(*THOUGHTS)
    rows = encode(Encoder(tokenizer, "chat"), prompt, chosen)
    assert len(rows) == 2
    turns = [*prompt, response_turn(chosen)]
    for (before, ids, trained, *_), length in zip(rows, (2, 4), strict=True):
        whole = rendered(tokenizer, turns[:length])
        assert whole[: len(before) + len(ids)] == [*before, *ids]
        assert trained == [1] * len(ids)


# --- rows that are rejected -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "messages", "tools", "reason"),
    [
        (CHATML, TOOLS[:2], [TOOL], "does not write the definitions of tools: use a model whose"),
        (CHATML, TOOLS[:4], [], "does not write calls of tools"),
        (WITHOUT_RESULTS, TOOLS, [TOOL], "does not write results of tools"),
        (CHATML, THOUGHTS, [], "does not write the reasoning_content of a response"),
        (None, TOOLS[:2], [TOOL], "template: dialogue cannot write thoughts, tools"),
        (None, TOOLS[:4], [], "template: dialogue cannot write thoughts, tools"),
    ],
)
@pytest.mark.parametrize("train_on", ["response", "all_turns"])
def test_a_template_that_leaves_out_a_part_rejects_the_row(
    chat_tokenizer, template, messages, tools, reason, train_on
):
    encoder = Encoder(chat_tokenizer(template), "chat" if template else "dialogue")
    with pytest.raises(TurnsRejected, match=reason):
        encode(encoder, *record(*messages, tools=tools), train_on=train_on)


def test_a_template_may_leave_out_the_white_space_of_a_result(chat_tokenizer):
    template = CHATML_TOOLS.replace("message.content", "message.content | trim")
    messages = [{**each, "value": each["value"].replace('{"rain": true}', "\n")} for each in TOOLS]
    encoder = Encoder(chat_tokenizer(template), "chat")
    [row] = encode(encoder, *record(*messages, tools=[TOOL]))
    assert not isinstance(row, str)


# Behind a prompt that ends in <think>.
STARTED = CHATML.replace("assistant\n{%", "assistant\n<think>\n{%")
AGAIN = "{{ '<think>\n' if message.role == 'assistant'%s }}{{ message.content }}"
KEPT, DOUBLED = (
    STARTED.replace("{{ message.content }}", AGAIN % condition)
    for condition in (" and '</think>' not in message.content", "")
)
CONTENT = "<think>\nso\n</think>\n\nyes"


def test_thoughts_that_a_prompt_starts_are_trained_once(chat_tokenizer):
    tokenizer = chat_tokenizer(KEPT)
    prompt, ids = encode_pair(Encoder(tokenizer, "chat"), [("user", "Hu")], f" {CONTENT}")
    assert tokenizer.decode([*prompt, *ids]).count("<think>") == 1
    assert tokenizer.decode(ids) == "so\n</think>\n\nyes<|im_end|>"
    for template in (DOUBLED, STARTED.replace("<think>", "<think>\n<think>")):
        with pytest.raises(TurnsRejected):
            encode_pair(Encoder(chat_tokenizer(template), "chat"), [("user", "Hu")], f" {CONTENT}")


def test_thoughts_inside_of_the_content_are_those_of_the_template(family):
    tokenizer = family("qwen thoughts")
    encoder = Encoder(tokenizer, "chat")
    # The template writes empty thoughts in front of the last turn: they are not trained.
    for content in (CONTENT, "yes"):
        _, ids = encode_pair(encoder, [("user", "Hu")], f" {content}")
        assert tokenizer.decode(ids) == f"{content}<|im_end|>"
    # A template that keeps the text behind the last thought loses the first one.
    with pytest.raises(TurnsRejected, match="does not write the content of a response"):
        encode_pair(encoder, [("user", "Hu")], " a</think>b</think>c")
    # A prompt that starts thoughts needs a response that has them.
    with pytest.raises(TurnsRejected, match=r"renders a dialogue as .*<think>"):
        encode_pair(Encoder(family("r1"), "chat"), [("user", "Hu")], " yes")


# --- all turns ------------------------------------------------------------------------------

END = "<|im_end|>"


def turns_of(*texts):
    """Turns of user and assistant in turn, and the last response."""
    roles = ["user", "assistant"] * len(texts)
    turns = list(zip(roles, texts, strict=False))
    return turns[:-1], f" {texts[-1]}"


def encoded(encoder, dialogue, limit=1000):
    """The decoded (prompt, trained texts) of each row, and what was cut of it."""
    return [
        row
        if isinstance(row, str)
        else (encoder.tokenizer.decode(row[0]), trained_text(encoder.tokenizer, row), row[-1])
        for row in encode(encoder, *dialogue, limit)
    ]


def question(text):
    return f"<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n"


SIX = turns_of("Hu", "yes", "man", "no", "yes", "Hu")


def test_turns_that_do_not_fit_start_a_row_without_older_turns(chat_tokenizer):
    encoder = Encoder(chat_tokenizer(), "chat")
    assert encoded(encoder, SIX) == [(question("Hu"), f"yes{END}no{END}Hu{END}", "")]
    first = [*chain(*encode_pair(encoder, SIX[0][:3], " no"))]
    assert encoded(encoder, SIX, len(first)) == [
        (question("Hu"), f"yes{END}no{END}", ""),
        (f"{question('man')}no{END}\n{question('yes')}", f"Hu{END}", "older turns"),
    ]
    [short] = encoder.prompts([SIX[0][:1]])
    assert encoded(encoder, SIX, len(short)) == [TOO_LONG] * 3


def test_turns_before_a_question_without_text_or_with_weight_0_are_not_trained(chat_tokenizer):
    turns = [("assistant", "Hi"), ("user", "Hu"), ("untrained", "yes"), ("user", "man")]
    turns += [("assistant", " "), ("user", "Hu")]
    [(_, learned, _)] = encoded(Encoder(chat_tokenizer(), "chat"), (turns, " no"))
    assert learned == f"no{END}"


@pytest.mark.parametrize("template", ["dialogue", "chat"])
@pytest.mark.parametrize("limit", [2, 5, 100])
def test_each_token_of_a_text_without_turns_is_trained_once(chat_tokenizer, template, limit):
    text = '{"a</s>": "<|im_end|>"}\n\nHuman: b'
    prompt, chosen, _ = record_of({"text": text}, "text", columns_of("text"))
    assert chosen == text
    encoder = Encoder(chat_tokenizer(), template)
    assert drop_reason(encoder, prompt, chosen) is None
    assert drop_reason(encoder, prompt, " ") == "empty response"
    rows = encode(encoder, prompt, chosen, limit, "all_tokens")
    whole = [*rows[0][0], *(token for _, ids, *_ in rows for token in ids)]
    assert whole[-1] == encoder.tokenizer.eos_token_id
    assert encoder.tokenizer.convert_ids_to_tokens(whole).count("<|im_end|>") == 1
    assert encoder.tokenizer.decode(whole[:-1]).removeprefix("<s>") == text
    assert all(len(context) + len(ids) <= limit for context, ids, *_ in rows)
    for (_, before, *_), (context, *_) in pairwise(rows):
        assert context == before[-1:]


# --- truncation ----------------------------------------------------------------------------------


class CountingEncoder:
    """Encode a prompt to bos, a marker and the letters of each turn, and a header."""

    def prompts(self, prompts):
        return [
            [0, *(ord(letter) for role, text in turns for letter in role[0].upper() + text), 1]
            for turns in prompts
        ]


SYSTEM = ("system", "sss")
TURNS = [("user", "aa"), ("assistant", "bbbb"), ("user", "cc"), ("assistant", "d"), ("user", "ee")]


@pytest.mark.parametrize(
    ("turns", "limit", "kept"),
    [
        # 2 + 3 + 5 + 3 + 2 + 3 = 18 tokens of prompt, 4 of response.
        (TURNS, 22, TURNS),
        (TURNS, 21, TURNS[2:]),
        # 5 tokens of prompt: the response loses its end.
        (TURNS, 6, TURNS[4:]),
        (TURNS, 5, None),
        # The system turn has 4 tokens and stays.
        ([SYSTEM, *TURNS], 25, [SYSTEM, *TURNS[2:]]),
        ([SYSTEM, *TURNS], 10, [SYSTEM, *TURNS[4:]]),
        # It is left out where it leaves no room for a response.
        ([SYSTEM, *TURNS], 9, TURNS[4:]),
        # A prompt without some turns starts with a turn of the user.
        ([("assistant", "Hi."), *TURNS], 24, TURNS),
        # Without turns, a prompt is kept whole or not at all.
        ([(UNMARKED, "text")], 8, [(UNMARKED, "text")]),
    ],
)
def test_older_turns_are_left_out_before_the_end_of_a_response_of_four_tokens(turns, limit, kept):
    assert fitting_turns(CountingEncoder(), turns, 4, limit) == kept
