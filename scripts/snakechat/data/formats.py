"""Dataset formats: how a row of a source becomes prompt, chosen and rejected.

A format has fields, each with a default column; `columns` in the config overrides the columns. A
column may be a path into structs and lists: answers.ja.0.text. Standard library only: the workflow
imports this module while it plans.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from snakechat.data.cells import (
    ROLES,
    BadRow,
    DroppedRow,
    check_columns,
    checked_number,
    checked_text,
    is_one,
    json_of,
    response_of,
    tools_turns,
    turns_of_messages,
)
from snakechat.data.dialogues import (
    RESPONSE,
    TOOLS,
    UNMARKED,
    Record,
    Turn,
    as_text,
    is_response,
    is_trained,
    parse_prompt,
    render_response,
)

# Formats of prompts without responses, of plain texts, and of single responses that are labelled
# good or bad.
PROMPTS, TEXTS, UNPAIRED = "prompt", "text", ("kto", "kto_text")
# Fields that the functions of formats check. Others are texts, or turns where has_messages.
UNCHECKED = ("first_score", "second_score", "label", "system")

# What to do about a column that is missing.
MISSING = (
    "check format, columns and keep of the dataset: without rejected responses, set columns to the"
    " other columns"
)

# The column of each field, or several whose texts are joined.
Columns = Mapping[str, str | list[str]]


class Format(NamedTuple):
    """A dataset format.

    Attributes:
        columns: Default column of each field.
        record: Makes a record of the fields, given by keyword.
        optional: Fields that the config's `columns` may omit.
    """

    columns: Mapping[str, str]
    record: Callable[..., Record]
    optional: tuple[str, ...] = ()


def record_of(row: Mapping[str, Any], format: str, columns: Columns) -> Record:
    """Convert a row of a source to a record.

    columns: From columns_of. The texts of several columns are joined by newlines, without the empty
        ones, as LLaMA-Factory joins an instruction and its input.

    Raises:
        BadRow: A column is missing, null or of the wrong type, or has what models do not read.
        DroppedRow: The row has a tie, dialogues that differ before their last response, no item
            at an index of a column's path, or the like.
    """
    read = {name for path in column_paths(columns) for name in (path, path.partition(".")[0])}
    check_columns(row, read)
    # Fields of formats with a system turn may be lists of messages. Others are texts.
    has_messages = "system" in FORMATS[format].optional
    fields: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, list):
            cells = (_field(row, path, name, nullable=True) for path in column)
            texts = [checked_text(cell, name) for cell in cells if cell is not None]
            fields[name] = "\n".join(filter(None, texts))
        else:
            fields[name] = _field(row, column, name)
        may_lack = fields[name] is None and name in FORMATS[format].optional
        if not (has_messages or name in UNCHECKED or may_lack):
            checked_text(fields[name], name)
    if has_messages:
        for name in [name for name in fields if name not in UNCHECKED]:
            fields[name] = turns_of_messages(fields[name], name)
    turns, chosen, rejected = FORMATS[format].record(**fields)
    # The column is read where a file has it; it has no meaning in texts.
    tools = tools_turns(row.get(TOOLS)) if has_messages else []
    return [*tools, *turns], chosen, rejected


def columns_of(format: str, columns: Columns | None = None) -> Columns:
    """Return the columns of a format's fields: the config's, or the defaults if None.

    Fields that the format does not have, or requires, are a ValueError.
    """
    defaults, optional = FORMATS[format].columns, FORMATS[format].optional
    if columns is None:
        return defaults
    fields = {**defaults, **dict.fromkeys(optional)}
    unknown = [name for name in columns if name not in fields]
    missing = [name for name in fields if name not in (*columns, *optional)]
    if unknown or missing:
        problem = "has no field" if unknown else "requires"
        raise ValueError(
            f"format {format} {problem} {', '.join(unknown or missing)}"
            f" (fields: {', '.join(fields)})"
        )
    return columns


def column_paths(columns: Columns) -> list[str]:
    """Return all columns of the fields of a format."""
    listed = (column if isinstance(column, list) else [column] for column in columns.values())
    return [path for paths in listed for path in paths]


def named_columns(keep: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return {name: column} of the columns that reward functions receive.

    keep: {name: column}, or columns, whose names are the last keys of their paths.
    """
    if isinstance(keep, Mapping):
        return dict(keep)
    names = [path.rpartition(".")[2] for path in keep]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two columns have the name {twice[0]}: set {{NAME: COLUMN}}")
    return dict(zip(names, keep, strict=True))


def kept_cells(row: Mapping[str, Any], keep: Iterable[str]) -> list[str]:
    """Return the cells of a row in columns that reward functions read, each as JSON."""
    return [json_of(_field(row, path, path, nullable=True), f"column {path}") for path in keep]


def with_instructions(prompt: list[Turn], template: str | None, system: str | None) -> list[Turn]:
    """Return a prompt with a system turn, where it has none, and the last question in a template.

    Args:
        template: A text with "{prompt}" in place of the user's last turn.
    """
    turns = list(prompt)
    roles = [role for role, _ in turns]
    asked = [place for place, role in enumerate(roles) if role in ("user", UNMARKED)]
    if template is not None and asked:
        role, text = turns[asked[-1]]
        content = text.removesuffix(RESPONSE)
        turns[asked[-1]] = role, template.replace("{prompt}", content) + text[len(content) :]
    if system is not None and "system" not in roles:
        turns.insert(roles.count(TOOLS), ("system", system))
    return turns


def has_pairs(format: str, columns: Columns | None = None) -> bool:
    """Return whether rows of a format have rejected responses in addition to chosen ones."""
    return bool(columns_of(format, columns).keys() & {"rejected", "second"})


def _field(row: Mapping[str, Any], path: str, name: str, nullable: bool = False) -> Any:
    """Return the value of a field: the column `path`, or the value at a path with dots."""
    nullable = nullable or name == "system"
    column, *keys = [path] if path in row else path.split(".")
    if column not in row:
        raise BadRow(
            f"column {column} is missing; the row has {', '.join(map(str, row))}: {MISSING}"
        )
    value = row[column]
    for key in keys:
        if isinstance(value, dict):
            if key not in value and not nullable:
                raise BadRow(f"{path}: key {key} is missing; found {', '.join(map(str, value))}")
            value = value.get(key)
        elif isinstance(value, list) and key.isdecimal():
            value = value[int(key)] if int(key) < len(value) else None
        elif value is not None:
            raise BadRow(f"{path}: {type(value).__name__} has no key {key}")
    if value is None and not nullable:
        if not keys:
            raise BadRow(f"column {path} is null")
        if name != "rejected":
            raise DroppedRow(f"no {name}")
    return value


def _with_space(text: str | None) -> str | None:
    return f" {text}" if text and not text[0].isspace() else text


def _plain(prompt: str, chosen: str, rejected: str | None = None) -> Record:
    """Texts with markers; a response that starts without a space gets one."""
    return parse_prompt(prompt), _with_space(chosen), _with_space(rejected)


def _instruct(prompt: str, chosen: str, rejected: str | None = None) -> Record:
    """An instruction and its responses, without markers."""
    other = None if rejected is None else render_response(rejected)
    return [("user", prompt)], render_response(chosen), other


def _last_turn(prompt: str, chosen: str, rejected: str) -> Record:
    """A prompt without the final "Assistant:"; responses that repeat the whole dialogue."""
    chosen, rejected = (as_text(text.split("Assistant:")[-1]) for text in (chosen, rejected))
    return parse_prompt(f"{prompt.rstrip()}{RESPONSE}"), chosen, rejected


def _dialogues(chosen: str, rejected: str) -> Record:
    """Two dialogues that are equal up to their last responses."""
    end = chosen.rfind(RESPONSE) + len(RESPONSE)
    if RESPONSE not in chosen:
        raise BadRow(f"chosen has no turn {RESPONSE.strip()!r}")
    if rejected[:end] != chosen[:end] or RESPONSE in rejected[end:]:
        raise DroppedRow("dialogues differ before the last response")
    return parse_prompt(chosen[:end]), as_text(chosen[end:]), as_text(rejected[end:])


def _scored(prompt: str, first: str, second: str, first_score: Any, second_score: Any) -> Record:
    """Two responses, each with a score; the one with the higher score is chosen."""
    of_first = checked_number(first_score, "first_score")
    of_second = checked_number(second_score, "second_score")
    if of_first == of_second:
        raise DroppedRow("tie")
    return _labelled(prompt, first, second, of_first > of_second)


def _labelled(prompt: str, first: str, second: str, label: Any) -> Record:
    """Two responses; label is 1 if the first one is chosen, 0 if the second one is."""
    return _instruct(prompt, *((first, second) if is_one(label) else (second, first)))


def _vicuna(prompt: str, chosen: str) -> Record:
    """Turns marked by "USER:" and "ASSISTANT:" in one text."""
    # White space separates turns from markers.
    start, *pieces = map(str.strip, re.split(r"\b(USER|ASSISTANT):", prompt))
    roles = [ROLES[name.lower()] for name in pieces[::2]]
    turns = list(zip(roles, pieces[1::2], strict=True))
    if turns and turns[-1] == ("assistant", ""):
        turns.pop()
    return _prompt(turns, start), _with_space(chosen), None


def _prompt(prompt: list[Turn], system: Any = None) -> list[Turn]:
    """Return a prompt with its system turn; a row without a question is dropped."""
    if system:
        first = [("system", checked_text(system, "system"))]
        if turns_of_messages(system, "system") != first:
            raise BadRow("system is JSON of messages, expected text")
        prompt = [*first, *prompt]
    if not any(role == "user" for role, _ in prompt):
        raise DroppedRow("no prompt")
    return prompt


def _messages(messages: list[Turn], system: Any = None) -> Record:
    """A list of messages: the last response to learn is chosen; those before it are the prompt."""
    trained = [number for number, turn in enumerate(messages) if is_trained(turn)]
    turns = messages[: trained[-1] + 1] if trained else _until_response(messages)
    return _prompt(turns[:-1], system), response_of(turns[-1]), None


def _until_response(turns: list[Turn]) -> list[Turn]:
    """Return turns up to the last response."""
    responses = [number for number, turn in enumerate(turns) if is_response(turn)]
    if not responses:
        raise DroppedRow("no response")
    return turns[: responses[-1] + 1]


def _message_pairs(
    chosen: list[Turn], rejected: list[Turn], prompt: Sequence[Turn] = (), system: Any = None
) -> Record:
    """Two lists of messages, each the whole dialogue or what follows the prompt.

    Without a column of prompts, the rejected response may also stand alone.
    """
    dialogues = []
    for name, turns in {"chosen": chosen, "rejected": rejected}.items():
        if not turns or not is_response(turns[-1]):
            raise BadRow(f"{name} does not end with a response")
        dialogues.append([*prompt, *turns] if is_response(turns[0]) else turns)
    (*question, good), (*others, bad) = dialogues
    if question != (others or question):
        raise DroppedRow("dialogues differ before the last response")
    return _prompt(question, system), response_of(good), response_of(bad)


def _unpaired(messages: list[Turn], label: Any, system: Any = None) -> Record:
    """A dialogue and whether its response is good: it is chosen or rejected (KTO)."""
    is_good, turns = is_one(label), _until_response(messages)
    return _unpaired_text([], turns, is_good, system)


def _unpaired_text(
    prompt: list[Turn], response: list[Turn], label: Any, system: Any = None
) -> Record:
    """A prompt, a response and whether it is good, each a text or messages, as TRL has them."""
    turns, good, _ = _message_pairs(response, response, prompt, system)
    return (turns, good, None) if is_one(label) else (turns, None, good)


def _same(*names: str) -> dict[str, str]:
    """Return default columns that are called as their fields."""
    return {name: name for name in names}


PAIR, SYSTEM = _same("prompt", "chosen", "rejected"), ("system",)
SCORED = _same("prompt", "first", "second", "first_score", "second_score")
FORMATS = {
    "plain": Format(PAIR, _plain, ("rejected",)),
    "instruct": Format(PAIR, _instruct, ("rejected",)),
    "text": Format(_same("text"), lambda text: ([], text, None)),
    "prompt": Format(_same("prompt"), lambda **prompt: (_prompt(**prompt), None, None), SYSTEM),
    "last_turn": Format(PAIR, _last_turn),
    "dialogues": Format(_same("chosen", "rejected"), _dialogues),
    "scored": Format(SCORED, _scored),
    "labelled": Format(_same("prompt", "first", "second", "label"), _labelled),
    "vicuna": Format({"prompt": "prompt", "chosen": "label"}, _vicuna),
    "messages": Format(_same("messages"), _messages, SYSTEM),
    "message_pairs": Format(_same("chosen", "rejected"), _message_pairs, ("prompt", "system")),
    "sharegpt": Format({"messages": "conversations"}, _messages, SYSTEM),
    "sharegpt_pairs": Format(PAIR | {"prompt": "conversations"}, _message_pairs, SYSTEM),
    "kto": Format(_same("messages", "label"), _unpaired, SYSTEM),
    "kto_text": Format(
        _same("prompt", "response", "label") | {"response": "completion"}, _unpaired_text, SYSTEM
    ),
}
