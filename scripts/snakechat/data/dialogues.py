"""Dialogues as text: turns marked by "\\n\\nHuman:", "\\n\\nAssistant:" and "\\n\\nSystem:".

Records store dialogues in this format, which Anthropic's hh-rlhf and Dahoas/rm-static use. A prompt
ends in "\\n\\nAssistant:"; a response starts with a space. Standard library only: the workflow
imports this module while it plans.
"""

import re
from collections.abc import Iterable
from typing import Any

NAMES = {"system": "System", "user": "Human", "assistant": "Assistant"}
ROLES = {name: role for role, name in NAMES.items()}
MARKER = re.compile(r"\n\n(System|Human|Assistant):")
RESPONSE = "\n\nAssistant:"

# A role (system, user or assistant) and the text of the turn.
Turn = tuple[str, str]

# render_prompt and render_response in Jinja, which has no regular expressions. The last response
# is followed by eos, as in training.
CHAT_TEMPLATE = (
    "{%- set names = "
    + str(NAMES)
    + r""" -%}
{%- for message in messages -%}
  {%- if message.role not in names -%}
    {{- raise_exception('roles are system, user and assistant, not ' ~ message.role) -}}
  {%- endif -%}
  {%- set turn = namespace(text=message.content | trim) -%}
  {%- for name in names.values() -%}
    {%- set parts = turn.text.split('\n\n' ~ name ~ ':') -%}
    {%- set turn.text = '' -%}
    {%- for part in parts -%}
      {%- set joint = '' if loop.last else '\n' ~ name ~ ':' -%}
      {%- set turn.text = turn.text ~ (part if loop.last else part.rstrip('\n')) ~ joint -%}
    {%- endfor -%}
  {%- endfor -%}
  {{- '\n\n' ~ names[message.role] ~ ': ' ~ turn.text -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '\n\nAssistant:' -}}
{%- elif messages and messages[-1].role == 'assistant' -%}
  {{- eos_token -}}
{%- endif -%}
"""
)


def render_prompt(turns: Iterable[Turn]) -> str:
    """Return the text of turns, up to the marker of the next response."""
    return "".join(f"\n\n{NAMES[role]}:{render_response(text)}" for role, text in turns) + RESPONSE


def render_response(text: str) -> str:
    """Return the text of a turn as it follows its marker: a space and the stripped text.

    Markers within the text lose their empty line, so that they do not start a turn.
    """
    return re.sub(r"(?<!\n)\n{2,}+(System|Human|Assistant):", r"\n\1:", f" {text.strip()}")


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
        needs_space = ids == with_space != without
        prefix = "{{- bos_token ~ ' ' -}}\n" if needs_space else "{{- bos_token -}}\n"
    return prefix + CHAT_TEMPLATE


def is_empty(prompt: str) -> bool:
    """Return whether a prompt has no text apart from its markers."""
    return not MARKER.sub("", prompt).strip()


def parse_turns(prompt: str) -> list[Turn]:
    """Return the turns of a prompt. A text without markers is one turn of the user."""
    start, *pieces = MARKER.split(prompt)
    turns = [("user", start.strip())] if start.strip() else []
    for name, text in zip(pieces[::2], pieces[1::2], strict=True):
        turns.append((ROLES[name], text.strip()))
    # The final marker starts the response; it is not a turn.
    return turns[:-1] if turns and turns[-1] == ("assistant", "") else turns
