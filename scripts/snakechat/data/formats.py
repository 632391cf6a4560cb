"""Formats: how a row of a source becomes prompt, chosen and rejected.

A format knows which cells it needs and under which columns they usually stand; `columns` of the
config names others. A path with dots goes into lists and structs: answers.ja.0.text. Standard
library only: the workflow imports this module while it plans.
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from snakechat.data.dialogues import RESPONSE, render_prompt, render_response

ROLES = {
    **dict.fromkeys(["system"], "system"),
    **dict.fromkeys(["user", "human"], "user"),
    **dict.fromkeys(["assistant", "gpt", "model"], "assistant"),
}


class BadRow(Exception):
    """A row that cannot be read as its format says: on_bad_row decides."""


class DroppedRow(Exception):
    """A sound row that is of no use here, by the reason that it is counted under."""


class Format(NamedTuple):
    """columns: where the cells stand, unless the config says otherwise; cells of `optional` may be
    left out of the config's columns; record: (prompt, chosen, rejected or None) of the cells."""

    columns: dict
    record: Callable
    optional: tuple = ()


def record_of(row, format, columns):
    """(prompt, chosen, rejected or None) of a source's row.

    columns: as from columns_of. Raises BadRow for a missing column, a cell without a value or of
    the wrong type; Dropped for a tie, dialogues that differ before their last response, or where a
    list of the row has no such item.
    """
    cells = {name: _cell(row, path, name) for name, path in columns.items()}
    return FORMATS[format].record(**cells)


def columns_of(format, columns=None):
    """{cell: path} of a format, with the config's columns in the place of the usual ones.

    Raises ValueError for cells that the format does not have, or that it needs.
    """
    usual, _, optional = FORMATS[format]
    if columns is None:
        return usual
    known = dict.fromkeys([*usual, *optional])
    unknown = [name for name in columns if name not in known]
    missing = [name for name in usual if name not in columns and name not in optional]
    if unknown or missing:
        what = f"has no {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)}"
        known = ", ".join(known)
        raise ValueError(f"format {format} {what} (its cells: {known})")
    return columns


def has_pairs(format, columns=None):
    """Whether rows of a format have rejected responses beside the chosen ones."""
    return bool(columns_of(format, columns).keys() & {"rejected", "second"})


def _cell(row, path, name):
    if path in row:
        if row[path] is None and name != "system":
            raise BadRow(f"{path} is nothing")
        return row[path]
    value, (column, *rest) = row, path.split(".")
    if column not in row:
        raise BadRow(f"no column {column}; it has {', '.join(map(str, row))}")
    value = row[column]
    for step in rest:
        if isinstance(value, dict):
            if step not in value and name != "system":
                raise BadRow(f"{path}: no {step}; there is {', '.join(map(str, value))}")
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal():
            value = value[int(step)] if int(step) < len(value) else None
        elif value is not None:
            raise BadRow(f"{path}: {step} is looked for in {type(value).__name__}")
    if value is None and name not in ("rejected", "system"):
        raise DroppedRow(f"no {name}")
    return value


def _text(value, name):
    if not isinstance(value, str):
        raise BadRow(f"{name} is {type(value).__name__}, expected text")
    return value


def _optional_text(value, name):
    return None if value is None else _text(value, name)


def _number(value, name):
    """A number, as it stands or, in csv, as text. NaN is none: it is neither more nor less."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise BadRow(f"{name} is {value!r}, expected a number")
    return number


def _is_one(label):
    number = _number(label, "label")
    if number not in (0, 1):
        raise BadRow(f"label is {label!r}, expected 1 or 0")
    return number == 1


def _plain(prompt, chosen, rejected=None):
    """All as it is. A response that touches its prompt gets a blank."""

    def apart(text):
        return text if text is None or not text or text[0].isspace() else f" {text}"

    chosen, rejected = _text(chosen, "chosen"), _optional_text(rejected, "rejected")
    return _text(prompt, "prompt"), apart(chosen), apart(rejected)


def _instruct(prompt, chosen, rejected=None):
    """A bare instruction and bare responses."""
    rejected = _optional_text(rejected, "rejected")
    return (
        render_prompt([("user", _text(prompt, "prompt"))]),
        render_response(_text(chosen, "chosen")),
        None if rejected is None else render_response(rejected),
    )


def _last_turn(prompt, chosen, rejected):
    """A prompt without its last "Assistant:", responses with all that comes before them."""
    return (
        f"{_text(prompt, 'prompt').rstrip()}{RESPONSE}",
        _text(chosen, "chosen").split("Assistant:")[-1],
        _text(rejected, "rejected").split("Assistant:")[-1],
    )


def _dialogues(chosen, rejected):
    """Two whole dialogues that are alike up to their last responses."""
    chosen, rejected = _text(chosen, "chosen"), _text(rejected, "rejected")
    before, marker, response = chosen.rpartition(RESPONSE)
    prompt, other = f"{before}{marker}", rejected[len(before) + len(marker) :]
    if not marker:
        raise BadRow(f"chosen has no {RESPONSE.strip()}")
    if not rejected.startswith(prompt) or RESPONSE in other:
        raise DroppedRow("dialogues differ before the last response")
    return prompt, response, other


def _scored(prompt, first, second, first_score, second_score):
    """Two responses with a number each: the higher one is chosen."""
    scores = _number(first_score, "first_score"), _number(second_score, "second_score")
    if scores[0] == scores[1]:
        raise DroppedRow("tie")
    return _labelled(prompt, first, second, scores[0] > scores[1])


def _labelled(prompt, first, second, label):
    """Two responses and which is better: 1 for the first, 0 for the second."""
    return _instruct(prompt, *((first, second) if _is_one(label) else (second, first)))


def _vicuna(prompt, chosen):
    """Turns behind "USER:" and "ASSISTANT:" in one text."""
    before, *parts = re.split(r"\s*\b(USER|ASSISTANT):", _text(prompt, "prompt"))
    roles = [ROLES[name.lower()] for name in parts[::2]]
    turns = list(zip(roles, parts[1::2], strict=True))
    if turns and turns[-1][0] == "assistant" and not turns[-1][1].strip():
        turns.pop()
    if before.strip():
        turns.insert(0, ("system", before))
    return _asked(turns), render_response(_text(chosen, "chosen")), None


def _turn(message, name):
    """(role, text) of a message in either of the two common spellings."""
    if not isinstance(message, dict):
        raise BadRow(f"{name} holds {type(message).__name__}, expected turns with role and content")
    # Tables that hold both spellings leave one of them empty.
    role = message.get("role") or message.get("from")
    text = message.get("value") if message.get("content") is None else message["content"]
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(f"{name} has a turn of {role!r}; known are {', '.join(ROLES)}")
    return ROLES[role], _text(text, f"{name}: the text of a turn")


def _turns(value, name, text_is):
    """Turns of a list of messages, of one message, or of a text that is one turn of text_is."""
    if isinstance(value, str):
        return [(text_is, value)]
    return [_turn(message, name) for message in (value if isinstance(value, list) else [value])]


def _asked(turns, system=None):
    if system:
        turns = [("system", _text(system, "system")), *turns]
    if not any(role == "user" for role, _ in turns):
        raise DroppedRow("no prompt")
    return render_prompt(turns)


def _messages(messages, system=None):
    """A list of messages: the last response is chosen, all before it is the prompt."""
    turns = _turns(messages, "messages", "user")
    while turns and turns[-1][0] != "assistant":
        turns.pop()
    if not turns:
        raise DroppedRow("no response")
    return _asked(turns[:-1], system), render_response(turns[-1][1]), None


def _message_pairs(chosen, rejected, prompt=None, system=None):
    """Two lists of messages, each the whole dialogue or what follows the prompt."""
    asked = [] if prompt is None else _turns(prompt, "prompt", "user")
    dialogues = []
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        turns = _turns(value, name, "assistant")
        if not turns or turns[-1][0] != "assistant":
            raise BadRow(f"{name} does not end with a response")
        dialogues.append(turns if turns[0][0] != "assistant" else [*asked, *turns])
    (*turns, (_, chosen)), (*others, (_, rejected)) = dialogues
    if turns != others:
        raise DroppedRow("dialogues differ before the last response")
    return _asked(turns, system), render_response(chosen), render_response(rejected)


def _unpaired(messages, label, system=None):
    """A response and whether it is good (KTO): the good ones are chosen, with nothing rejected."""
    if not _is_one(label):
        raise DroppedRow("labelled bad")
    return _messages(messages, system)


def _same(*names):
    return {name: name for name in names}


PAIR = _same("prompt", "chosen", "rejected")
FORMATS = {
    "plain": Format(PAIR, _plain, optional=("rejected",)),
    "instruct": Format(PAIR, _instruct, optional=("rejected",)),
    "last_turn": Format(PAIR, _last_turn),
    "dialogues": Format(_same("chosen", "rejected"), _dialogues),
    "scored": Format(_same("prompt", "first", "second", "first_score", "second_score"), _scored),
    "labelled": Format(_same("prompt", "first", "second", "label"), _labelled),
    "vicuna": Format({"prompt": "prompt", "chosen": "label"}, _vicuna),
    "messages": Format(_same("messages"), _messages, optional=("system",)),
    "message_pairs": Format(
        _same("chosen", "rejected"), _message_pairs, optional=("prompt", "system")
    ),
    "sharegpt": Format({"messages": "conversations"}, _messages, optional=("system",)),
    "sharegpt_pairs": Format(
        {"prompt": "conversations", "chosen": "chosen", "rejected": "rejected"},
        _message_pairs,
        optional=("system",),
    ),
    "kto": Format(_same("messages", "label"), _unpaired, optional=("system",)),
}
