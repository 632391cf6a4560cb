"""Dialogues as turns, and their text: turns marked by "\\n\\nHuman:" and the like.

A record keeps the prompt as a list of turns and never changes their texts. The template `dialogue`
writes the turns as one text in the format of Anthropic's hh-rlhf and Dahoas/rm-static: a marker and
a space in front of the text of each turn, and "\\n\\nAssistant:" in front of the response. Standard
library only: the workflow imports this module while it plans.

A message that is more than a role and a text, such as one with thoughts or a call of tools, is a
turn of the role MESSAGE, whose text is the message as JSON. As a response in a record it is this
JSON alone; other responses start with white space.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

NAMES = {"system": "System", "user": "Human", "assistant": "Assistant"}
ROLES = {name: role for role, name in NAMES.items()}
MARKER = re.compile(r"\n\n(System|Human|Assistant):")
RESPONSE = "\n\nAssistant:"
# The role of a text without a marker: a prompt that has none, or what precedes the first one.
UNMARKED = "unmarked"

# The tools that a dialogue may call, as JSON: a list of OpenAI's function definitions.
TOOLS = "tools"
MESSAGE = "message"
# The key of a message with the thoughts that precede its text.
THOUGHTS = "reasoning_content"
# A response that is not to be learned.
UNTRAINED = "untrained"

# A role and the text of the turn. The roles are system, user, assistant and tool, and those above.
Turn = tuple[str, str]

# The turns of the prompt, and chosen and rejected as they follow the prompt: with a space in front,
# or as JSON of a message.
# Without a rejected response that one is None, without any response both; a single response that is
# labelled good is chosen, one that is labelled bad is rejected. A text for continued pretraining is
# chosen, as it is, after an empty prompt.
Record = tuple[list[Turn], str | None, str | None]
# The splits of a dataset of records.
SPLITS = ("train", "eval")

# What the text of a dialogue calls the roles.
MARKERS = {**NAMES, "tool": "Tool", TOOLS: "Tools", MESSAGE: "Message", UNTRAINED: "Assistant"}

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

    A prompt without any marker is its text alone: the response continues it. Without turns, the
    response is a text that is not a dialogue.
    """
    text, role = "", UNMARKED
    for role, content in turns:
        text += content if role == UNMARKED else f"\n\n{MARKERS[role]}:{render_response(content)}"
    return text if role == UNMARKED else text + RESPONSE


def render_response(text: str) -> str:
    """Return a text as it follows its marker."""
    return f" {text}"


def response_content(text: str) -> str:
    """Return the text of a response that follows a marker; the inverse of render_response."""
    return text.removeprefix(" ")


def messages_of(turns: Iterable[Turn]) -> list[dict[str, Any]]:
    """Return turns as the messages of a chat template, without the definitions of tools."""
    return [message_of(turn) for turn in turns if turn[0] != TOOLS]


def message_of(turn: Turn) -> dict[str, Any]:
    """Return a turn as a message of a chat template. The user writes unmarked text."""
    role, text = turn
    if role == MESSAGE:
        message: dict[str, Any] = json.loads(text)
        # As transformers does: gpt-oss's template reads the other name.
        return {"thinking": message[THOUGHTS], **message} if THOUGHTS in message else message
    if role == UNMARKED:
        return {"role": "user", "content": text.removesuffix(RESPONSE)}
    return {"role": "assistant" if role == UNTRAINED else role, "content": text}


def is_response(turn: Turn) -> bool:
    """Return whether the assistant writes a turn."""
    return bool(message_of(turn)["role"] == "assistant")


def is_trained(turn: Turn) -> bool:
    """Return whether a turn is a response that may be learned."""
    return turn[0] != UNTRAINED and is_response(turn) and "weight" not in message_of(turn)


def tools_of(turns: Iterable[Turn]) -> list[dict[str, Any]] | None:
    """Return the tools that a dialogue may call; None if it has none."""
    return next((json.loads(text) for role, text in turns if role == TOOLS), None)


def is_message(response: str) -> bool:
    """Return whether a response in a record is a message as JSON."""
    return response.startswith("{")


def as_text(response: str) -> str:
    """Return a response that is text, even if it looks like a message as JSON."""
    return render_response(response) if is_message(response) else response


def response_turn(response: str) -> Turn:
    """Return the turn of a response in a record."""
    if is_message(response):
        return MESSAGE, response
    return "assistant", response_content(response)


def recorded_response(turn: Turn) -> str:
    """Return a turn of the assistant as a response in a record; the inverse of response_turn."""
    role, text = turn
    return text if role == MESSAGE else render_response(text)


def chat_template(tokenizer: Any) -> str:
    """Return the chat template that renders messages to this format, for inference servers.

    The template writes what the tokenizer puts in front of a text, because chat templates replace
    it: bos, and the space of SentencePiece tokenizers, unless these also put it behind bos.
    """
    if tokenizer("").input_ids[:1] != [tokenizer.bos_token_id]:
        return CHAT_TEMPLATE
    ids, bos = tokenizer(RESPONSE).input_ids, tokenizer.bos_token
    with_space, without = (
        tokenizer(f"{bos}{space}{RESPONSE}", add_special_tokens=False).input_ids
        for space in (" ", "")
    )
    # Some tokenizers append eos.
    needs_space = with_space != without and ids[: len(with_space)] == with_space
    return ("{{- bos_token ~ ' ' -}}\n" if needs_space else "{{- bos_token -}}\n") + CHAT_TEMPLATE


def parse_prompt(text: str) -> list[Turn]:
    """Return the turns of a prompt in which markers mark them.

    The first space after a marker belongs to the marker, all other white space to the text. A
    prompt without a turn of its own is one unmarked text.
    """
    marked, num_ends = re.subn(rf"{RESPONSE}\s*\Z", "", text)
    start, *pieces = MARKER.split(marked)
    if not pieces:
        return [(UNMARKED, start + RESPONSE * num_ends)]
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    marked_turns = [(ROLES[name], turn.removeprefix(" ")) for name, turn in turns]
    return [(UNMARKED, start), *marked_turns] if start.strip() else marked_turns
