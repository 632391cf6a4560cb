"""Dialogues as turns, and their text: turns marked by "\\n\\nHuman:" and the like.

A record keeps the prompt as a list of turns and never changes their texts. The template `dialogue`
writes the turns as one text in the format of Anthropic's hh-rlhf and Dahoas/rm-static: a marker and
a space in front of the text of each turn, and "\\n\\nAssistant:" in front of the response. Standard
library only: the workflow imports this module while it plans.
"""

import re
from collections.abc import Iterable
from typing import Any

NAMES = {"system": "System", "user": "Human", "assistant": "Assistant"}
ROLES = {name: role for role, name in NAMES.items()}
MARKER = re.compile(r"\n\n(System|Human|Assistant):")
RESPONSE = "\n\nAssistant:"
# The role of a text without a marker: a prompt that has none, or what precedes the first one.
UNMARKED = "unmarked"

# A role (system, user, assistant or unmarked) and the text of the turn.
Turn = tuple[str, str]

# render_prompt in Jinja. The last response is followed by eos, as in training.
CHAT_TEMPLATE = (
    "{%- set names = "
    + str(NAMES)
    + r""" -%}
{%- for message in messages -%}
  {%- if message.role not in names -%}
    {{- raise_exception('roles are system, user and assistant, not ' ~ message.role) -}}
  {%- endif -%}
  {{- '\n\n' ~ names[message.role] ~ ': ' ~ message.content -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '\n\nAssistant:' -}}
{%- elif messages and messages[-1].role == 'assistant' -%}
  {{- eos_token -}}
{%- endif -%}
"""
)


def render_prompt(turns: Iterable[Turn]) -> str:
    """Return turns as one text, up to the marker of the response.

    A prompt without any marker is its text alone: the response continues it.
    """
    turns = list(turns)
    text = "".join(
        text if role == UNMARKED else f"\n\n{NAMES[role]}:{render_response(text)}"
        for role, text in turns
    )
    return text if turns and turns[-1][0] == UNMARKED else text + RESPONSE


def render_response(text: str) -> str:
    """Return a text as it follows its marker."""
    return f" {text}"


def response_content(text: str) -> str:
    """Return the text of a response that follows a marker; the inverse of render_response."""
    return text.removeprefix(" ")


def messages_of(turns: Iterable[Turn]) -> list[dict[str, str]]:
    """Return turns as the messages of a chat template. The user writes unmarked text."""
    return [
        {"role": "user", "content": text.removesuffix(RESPONSE)}
        if role == UNMARKED
        else {"role": role, "content": text}
        for role, text in turns
    ]


def chat_template(tokenizer: Any) -> str:
    """Return the chat template that renders messages to this format, for inference servers.

    The template writes what the tokenizer puts in front of a text, because chat templates replace
    it: bos, and the space of SentencePiece tokenizers, unless these also put it behind bos.
    """
    has_bos = tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
    prefix = ""
    if has_bos:
        ids, bos = tokenizer(RESPONSE).input_ids, tokenizer.bos_token
        with_space = tokenizer(f"{bos} {RESPONSE}", add_special_tokens=False).input_ids
        without = tokenizer(f"{bos}{RESPONSE}", add_special_tokens=False).input_ids
        # Some tokenizers append eos.
        needs_space = ids[: len(with_space)] == with_space != without
        prefix = "{{- bos_token ~ ' ' -}}\n" if needs_space else "{{- bos_token -}}\n"
    return prefix + CHAT_TEMPLATE


def is_empty(turns: Iterable[Turn]) -> bool:
    """Return whether no turn has text."""
    return not any(message["content"].strip() for message in messages_of(turns))


def parse_prompt(text: str) -> list[Turn]:
    """Return the turns of a prompt in which markers mark them.

    The first space after a marker belongs to the marker, all other white space to the text. A
    prompt without a turn of its own is one unmarked text.
    """
    marked, num_ends = re.subn(rf"{RESPONSE}\s*\Z", "", text)
    start, *pieces = MARKER.split(marked)
    if not pieces:
        return [(UNMARKED, start + RESPONSE * num_ends)]
    turns = [(UNMARKED, start)] if start.strip() else []
    for name, turn in zip(pieces[::2], pieces[1::2], strict=True):
        turns.append((ROLES[name], turn.removeprefix(" ")))
    return turns
