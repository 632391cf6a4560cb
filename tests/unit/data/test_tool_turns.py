"""Dialogues with tools, and all turns of a dialogue, as ids of the model's own chat template."""

import json
from itertools import chain, pairwise
from types import SimpleNamespace

import pytest

from snakechat.data.chat_templates import TurnsRejected
from snakechat.data.dialogues import messages_of, response_turn, tools_of
from snakechat.data.encoder import Encoder, accepted
from snakechat.data.formats import columns_of, record_of
from snakechat.data.row_encoding import (
    TOO_LONG,
    drop_reason,
    encode_responses,
    encode_turns,
)
from snakechat.data.tokenizers import load_tokenizer
from snakechat.workflow.errors import InputError
from support.chat_templates import CHATML, CHATML_TOOLS, LLAMA
from support.encoding import encode_pair

TOOL = {"name": "weather", "description": "Ask.", "parameters": {"type": "object"}}
CALL = {"name": "weather", "arguments": {"city": "Bern", "days": 2}}
CONVERSATION = [
    {"from": "human", "value": "Hello."},
    {"from": "gpt", "value": "Hi."},
    {"from": "human", "value": "Will it rain?"},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": '{"rain": true}'},
    {"from": "gpt", "value": "Yes."},
]
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Bern", "days": 2}}'
TAGGED_CALL = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
CALL_TEXTS = {"llama": LLAMA_CALL, "chatml": TAGGED_CALL, "qwen3": TAGGED_CALL}
WITHOUT_RESULTS = CHATML_TOOLS.replace("in messages %}", "in messages if message.role != 'tool' %}")


def record(*messages, tools=(TOOL,)):
    row = {"conversations": list(messages), "tools": json.dumps(tools)}
    prompt, chosen, _ = record_of(row, "sharegpt", columns_of("sharegpt"))
    return prompt, chosen


@pytest.fixture(params=["chatml", "llama", "qwen3"])
def family(request, chat_tokenizer):
    """The name of a family, and a tokenizer with its chat template."""
    if request.param == "chatml":
        return "chatml", chat_tokenizer(CHATML_TOOLS)
    shared = request.getfixturevalue("shared_data") / "tokenizers"
    if request.param == "qwen3":
        return "qwen3", load_tokenizer(shared / "qwen3")
    tokenizer = load_tokenizer(shared / "llama3_1")
    tokenizer.chat_template = LLAMA
    return "llama", tokenizer


def rendered_ids(tokenizer, prompt, chosen):
    """The ids of a dialogue as transformers renders it, with a question behind it."""
    turns = [*prompt, response_turn(chosen), ("user", "Thanks.")]
    options = {"tools": tools_of(turns), "return_dict": False}
    return list(tokenizer.apply_chat_template(messages_of(turns), **options))


@pytest.mark.parametrize("end", [6, 4, 2])
def test_a_dialogue_with_tools_has_the_ids_of_the_templates_own_rendering(family, end):
    name, tokenizer = family
    prompt, chosen = record(*CONVERSATION[:end])
    encoder = Encoder(tokenizer, "chat")
    before, response = encode_pair(encoder, prompt, chosen)
    ids = [*before, *response]
    assert rendered_ids(tokenizer, prompt, chosen)[: len(ids)] == ids
    texts = {6: "Yes.", 4: CALL_TEXTS[name], 2: "Hi."}
    assert tokenizer.decode(response[:-1]) == texts[end]
    assert "weather" in tokenizer.decode(before)


def test_all_turns_of_the_assistant_are_trained_and_nothing_else(family):
    name, tokenizer = family
    prompt, chosen = record(*CONVERSATION)
    encoder = Encoder(tokenizer, "chat")
    settings = SimpleNamespace(max_length=10_000)
    [[(first, ids, trained, lengths, cut)]] = encode_turns(encoder, settings, [prompt], [chosen])
    whole = [*first, *ids]
    assert rendered_ids(tokenizer, prompt, chosen)[: len(whole)] == whole
    assert lengths == [len(ids)] == [len(trained)] and cut == ""
    end = tokenizer.decode([encoder.end_id])
    learned = [token for token, mark in zip(ids, trained, strict=True) if mark]
    assert tokenizer.decode(learned) == f"Hi.{end}{CALL_TEXTS[name]}{end}Yes.{end}"


@pytest.mark.parametrize(
    ("template", "end", "tools", "missing"),
    [
        (CHATML, 2, [TOOL], "the definitions of tools"),
        (CHATML, 4, [], "calls of tools"),
        (WITHOUT_RESULTS, 6, [TOOL], "results of tools"),
    ],
)
def test_a_template_that_leaves_out_tools_is_refused(chat_tokenizer, template, end, tools, missing):
    prompt, chosen = record(*CONVERSATION[:end], tools=tools)
    encoder = Encoder(chat_tokenizer(template), "chat")
    with pytest.raises(TurnsRejected, match=f"the chat template does not write {missing}: use a"):
        encode_pair(encoder, prompt, chosen)


@pytest.mark.parametrize("end", [2, 4])
def test_the_template_dialogue_refuses_tools(trained, end):
    encoder = Encoder(trained, "dialogue")
    prompt, chosen = record(*CONVERSATION[:end], tools=[] if end == 4 else [TOOL])
    with pytest.raises(TurnsRejected, match="template: dialogue cannot write thoughts, tools"):
        encode_pair(encoder, prompt, chosen)


# --- all turns ------------------------------------------------------------------------------


def turns_of(*texts):
    """Turns of user and assistant in turn, and the last response."""
    roles = ["user", "assistant"] * len(texts)
    turns = list(zip(roles, texts, strict=False))
    return turns[:-1], f" {texts[-1]}"


def encoded(encoder, dialogue, limit=1000):
    """The decoded (prompt, trained texts) of each row, and what was cut of it."""
    settings, decode = SimpleNamespace(max_length=limit), encoder.tokenizer.decode
    [rows] = accepted(encode_turns(encoder, settings, [dialogue[0]], [dialogue[1]]))
    found = []
    for row in rows:
        if isinstance(row, str):
            found.append(row)
            continue
        prompt, ids, trained, _, cut = row
        learned = [token for token, mark in zip(ids, trained, strict=True) if mark]
        found.append((decode(prompt), decode(learned), cut))
    return found


END = "<|im_end|>"


def question(text):
    return f"<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n"


def test_turns_that_do_not_fit_start_a_row_without_older_turns(chat_tokenizer):
    encoder = Encoder(chat_tokenizer(), "chat")
    dialogue = turns_of("Hu", "yes", "man", "no", "yes", "Hu")
    whole = encoded(encoder, dialogue)
    assert whole == [(question("Hu"), f"yes{END}no{END}Hu{END}", "")]
    first = [*chain(*encode_pair(encoder, dialogue[0][:3], " no"))]
    assert encoded(encoder, dialogue, len(first)) == [
        (question("Hu"), f"yes{END}no{END}", ""),
        (f"{question('man')}no{END}\n{question('yes')}", f"Hu{END}", "older turns"),
    ]
    [short] = encoder.prompts([dialogue[0][:1]])
    assert encoded(encoder, dialogue, len(short)) == [TOO_LONG] * 3


def test_each_turn_follows_the_prompt_that_the_model_has_when_it_responds(chat_tokenizer, trained):
    dialogue = turns_of("Hu", "yes", "man", "no")
    # As Qwen3 leaves out thoughts, this template leaves out the first letter of older responses.
    forgetful = CHATML.replace(
        "{{ message.content }}",
        "{{ message.content if loop.last or message.role == 'user' else message.content[1:] }}",
    )
    assert encoded(Encoder(chat_tokenizer(forgetful), "chat"), dialogue) == [
        (question("Hu"), f"yes{END}", ""),
        (f"{question('Hu')}es{END}\n{question('man')}", f"no{END}", ""),
    ]
    # In dialogues of text, no token ends the earlier responses.
    assert encoded(Encoder(trained, "dialogue"), dialogue) == [
        ("<s>\n\nHuman: Hu\n\nAssistant:", " yes</s>", ""),
        ("<s>\n\nHuman: Hu\n\nAssistant: yes\n\nHuman: man\n\nAssistant:", " no</s>", ""),
    ]


@pytest.mark.parametrize(
    "template",
    [
        # The last five messages; a mark of the last one.
        CHATML.replace("in messages", "in messages[-5:]"),
        CHATML.replace("{{ message.role }}", "{{ message.role }}{{ '!' if loop.last }}"),
    ],
)
def test_a_template_that_writes_a_prompt_differently_later_is_rejected(chat_tokenizer, template):
    dialogue = turns_of("Hu", "yes", "man", "no", "yes", "Hu")
    with pytest.raises(InputError, match="the chat template renders a dialogue as"):
        encoded(Encoder(chat_tokenizer(template), "chat"), dialogue)


def test_turns_before_a_question_without_text_or_with_weight_0_are_not_trained(chat_tokenizer):
    encoder = Encoder(chat_tokenizer(), "chat")
    turns = [("assistant", "Hi"), ("user", "Hu"), ("untrained", "yes"), ("user", "man")]
    turns += [("assistant", " "), ("user", "Hu")]
    [(_, learned, _)] = encoded(encoder, (turns, " no"))
    assert learned == f"no{END}"


@pytest.mark.parametrize("template", ["dialogue", "chat"])
@pytest.mark.parametrize("limit", [2, 5, 100])
def test_each_token_of_a_text_without_turns_is_trained_once(chat_tokenizer, template, limit):
    text = '{"a</s>": "<|im_end|>"}\n\nHuman: b'
    prompt, chosen, _ = record_of({"text": text}, "text", columns_of("text"))
    assert chosen == text
    encoder, settings = Encoder(chat_tokenizer(), template), SimpleNamespace(max_length=limit)
    assert drop_reason(encoder, prompt, chosen) is None
    assert drop_reason(encoder, prompt, " ") == "empty response"
    [rows] = encode_responses(encoder, settings, [prompt], [chosen])
    learned = [token for _, ids, *_ in rows for token in ids]
    first, *_ = rows[0]
    whole = [*first, *learned]
    assert whole[-1] == encoder.tokenizer.eos_token_id
    assert encoder.tokenizer.convert_ids_to_tokens(whole).count("<|im_end|>") == 1
    assert encoder.tokenizer.decode(whole[:-1]).removeprefix("<s>") == text
    assert all(len(context) + len(ids) <= limit for context, ids, *_ in rows)
    for (_, before, *_), (context, *_) in pairwise(rows):
        assert context == before[-1:]
