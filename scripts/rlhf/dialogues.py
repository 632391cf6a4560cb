"""Dialogues as text: turns behind "\\n\\nHuman:", "\\n\\nAssistant:" and "\\n\\nSystem:".

The form of Anthropic's hh-rlhf and Dahoas/rm-static, which records are kept in. A prompt ends in
"\\n\\nAssistant:"; an answer starts with a blank. Standard library only: the workflow imports this
module while it plans.
"""

import re

NAMES = {"system": "System", "user": "Human", "assistant": "Assistant"}
ROLES = {name: role for role, name in NAMES.items()}
MARKER = re.compile(r"\n\n(System|Human|Assistant):")
ANSWER = "\n\nAssistant:"


def prompt_of(turns):
    """Text of (role, text) turns up to where the next answer begins."""
    return "".join(f"\n\n{NAMES[role]}:{answer_of(text)}" for role, text in turns) + ANSWER


def answer_of(text):
    """A turn's text behind its marker. What looks like a marker in it loses its empty line."""
    return re.sub(r"\n{2,}(System|Human|Assistant):", r"\n\1:", f" {text.strip()}")


def is_empty(prompt):
    """Whether a prompt says nothing, whatever turns it has."""
    return not MARKER.sub("", prompt).strip()


def turns_of(prompt):
    """(role, text) turns of a prompt; a text without markers is one turn of the user."""
    before, *parts = MARKER.split(prompt)
    turns = [("user", before.strip())] if before.strip() else []
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        turns.append((ROLES[name], text.strip()))
    # The marker where the answer begins is no turn yet.
    return turns[:-1] if turns and turns[-1] == ("assistant", "") else turns
