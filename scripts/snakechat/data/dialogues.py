"""Dialogues as text: turns behind "\\n\\nHuman:", "\\n\\nAssistant:" and "\\n\\nSystem:".

The form of Anthropic's hh-rlhf and Dahoas/rm-static, which records are kept in. A prompt ends in
"\\n\\nAssistant:"; a response starts with a blank. Standard library only: the workflow imports this
module while it plans.
"""

import re

NAMES = {"system": "System", "user": "Human", "assistant": "Assistant"}
ROLES = {name: role for role, name in NAMES.items()}
MARKER = re.compile(r"\n\n(System|Human|Assistant):")
RESPONSE = "\n\nAssistant:"

# prompt_of and response_of in Jinja, which has no regular expressions. After the last response stands
# eos, as in training.
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


def render_prompt(turns):
    """Text of (role, text) turns up to where the next response begins."""
    return "".join(f"\n\n{NAMES[role]}:{render_response(text)}" for role, text in turns) + RESPONSE


def render_response(text):
    """A turn's text behind its marker. What looks like a marker in it loses its empty line."""
    return re.sub(r"\n{2,}(System|Human|Assistant):", r"\n\1:", f" {text.strip()}")


def chat_template(tokenizer):
    """The chat template by which a tokenizer makes the same text of messages, for servers.

    What the tokenizer itself puts in front (bos), a chat template has to write.
    """
    has_bos = tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]
    return ("{{- bos_token -}}\n" if has_bos else "") + CHAT_TEMPLATE


def is_empty(prompt):
    """Whether a prompt says nothing, whatever turns it has."""
    return not MARKER.sub("", prompt).strip()


def parse_turns(prompt):
    """(role, text) turns of a prompt; a text without markers is one turn of the user."""
    before, *parts = MARKER.split(prompt)
    turns = [("user", before.strip())] if before.strip() else []
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        turns.append((ROLES[name], text.strip()))
    # The marker where the response begins is no turn yet.
    return turns[:-1] if turns and turns[-1] == ("assistant", "") else turns
