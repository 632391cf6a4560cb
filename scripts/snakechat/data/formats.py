"""Dataset formats: how a row of a source becomes prompt, chosen and rejected.

A format has fields, each with a default column; `columns` in the config overrides the columns. A
column may be a path into structs and lists: answers.ja.0.text. Standard library only: the workflow
imports this module while it plans.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from snakechat.data.dialogues import RESPONSE, Turn, parse_prompt, render_response
from snakechat.workflow.printable import printable_line

# The turns of the prompt, and chosen and rejected as they follow the prompt: with a space in front.
# Without a rejected response that one is None, without any response both; a single response that is
# labelled good is chosen, one that is labelled bad is rejected.
Record = tuple[list[Turn], str | None, str | None]

# The column of each field, or several whose texts are joined.
Columns = Mapping[str, str | list[str]]

# Characters of the reason why a row is bad.
MAX_REASON = 500

# Roles in sources, by their names in lower case.
ROLES = {
    **dict.fromkeys(["system"], "system"),
    **dict.fromkeys(["user", "human"], "user"),
    **dict.fromkeys(["assistant", "gpt", "model"], "assistant"),
}

# Keys of messages that training does not support: it would learn to say what comes before them.
UNSUPPORTED_KEYS = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
# The column with the tools that a dialogue may call; read where a file has it.
TOOLS = "tools"
EMPTY_JSON = ("[]", "{}", "null")
# Text of a list of messages, or of one message.
MESSAGES = re.compile(r"""\s*(\[\s*)?\{\s*["'](role|from|content|value)["']\s*:""")
ROLE = re.compile(r"""["'](role|from)["']\s*:""")


class BadRow(Exception):
    """A row that does not have the format of its dataset; on_bad_row decides what happens."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable_line(reason, MAX_REASON))


class DroppedRow(Exception):
    """A valid row that gives no record. The message is the reason, under which it is counted."""


class Format(NamedTuple):
    """A dataset format.

    Attributes:
        columns: Default column of each field.
        record: Makes a record of the fields, given by keyword.
        optional: Fields that the config's `columns` may omit.
        has_messages: Whether fields are lists of messages.
    """

    columns: Mapping[str, str]
    record: Callable[..., Record]
    optional: tuple[str, ...] = ()
    has_messages: bool = False


def record_of(row: Mapping[str, Any], format: str, columns: Columns) -> Record:
    """Convert a row of a source to a record.

    columns: From columns_of. The texts of several columns are joined by newlines, without the empty
        ones, as LLaMA-Factory joins an instruction and its input.

    Raises:
        BadRow: A column is missing, null or of the wrong type, or a dialogue uses tools.
        DroppedRow: The row has a tie, dialogues that differ before their last response, no item
            at an index of a column's path, or the like.
    """
    fields = {
        name: _joined(row, column, name) if isinstance(column, list) else _field(row, column, name)
        for name, column in columns.items()
    }
    if FORMATS[format].has_messages:
        if (tools := row.get(TOOLS)) and tools not in EMPTY_JSON:
            raise BadRow(f"column {TOOLS} is not empty, but tools are not supported")
        fields = {name: _parsed(value, name) for name, value in fields.items()}
    return FORMATS[format].record(**fields)


def _parsed(value: Any, name: str) -> Any:
    """Return a cell; messages that are JSON text, as in csv files, are parsed."""
    is_text = isinstance(value, str) and (
        name == "messages" or (MESSAGES.match(value) and ROLE.search(value))
    )
    if not is_text:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{name} is text, but not JSON of messages: {error}") from None


def columns_of(format: str, columns: Columns | None = None) -> Columns:
    """Return the columns of a format's fields: the config's, or the defaults if None.

    Raises:
        ValueError: columns has fields that the format does not have, or lacks required ones.
    """
    defaults, optional = FORMATS[format].columns, FORMATS[format].optional
    if columns is None:
        return defaults
    fields = dict.fromkeys([*defaults, *optional])
    unknown = [name for name in columns if name not in fields]
    missing = [name for name in defaults if name not in columns and name not in optional]
    if unknown or missing:
        problem = (
            f"has no field {', '.join(unknown)}" if unknown else f"requires {', '.join(missing)}"
        )
        raise ValueError(f"format {format} {problem} (fields: {', '.join(fields)})")
    return columns


def missing_hint(column: str) -> str:
    """Return what to do about a missing column; an empty text for any but rejected."""
    advice = ": list the other columns under columns if there are no rejected responses"
    return advice if column == "rejected" else ""


def column_paths(columns: Columns) -> list[str]:
    """Return all columns of the fields of a format."""
    return [
        path
        for column in columns.values()
        for path in (column if isinstance(column, list) else [column])
    ]


def named_columns(keep: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Return {name: column} of the columns that reward functions receive.

    keep: {name: column}, or columns, whose names are the last keys of their paths.

    Raises:
        ValueError: Two columns have the same name.
    """
    if isinstance(keep, Mapping):
        return dict(keep)
    columns = {path.rpartition(".")[2]: path for path in keep}
    if len(columns) < len(keep):
        names = [path.rpartition(".")[2] for path in keep]
        name = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two columns have the name {name}: set {{NAME: COLUMN}}")
    return columns


def kept_cells(row: Mapping[str, Any], keep: Iterable[str]) -> list[str]:
    """Return the cells of a row in columns that reward functions read, each as JSON.

    Raises:
        BadRow: A column is missing, or a cell has no JSON form.
    """
    cells = []
    for path in keep:
        value = _field(row, path, path, nullable=True)
        try:
            cells.append(json.dumps(value, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise BadRow(f"column {path}: {error}") from None
    return cells


def has_responses(format: str) -> bool:
    """Return whether rows of a format have responses, and not only prompts."""
    return format != "prompt"


def is_unpaired(format: str) -> bool:
    """Return whether each row of a format has a single response, labelled good or bad."""
    return format == "kto"


def has_pairs(format: str, columns: Columns | None = None) -> bool:
    """Return whether rows of a format have rejected responses in addition to chosen ones."""
    return bool(columns_of(format, columns).keys() & {"rejected", "second"})


def _joined(row: Mapping[str, Any], paths: Sequence[str], name: str) -> str:
    """Return the texts of several columns, joined by newlines without the empty ones."""
    cells = [_field(row, path, name, nullable=True) for path in paths]
    texts = [_text(cell, name) for cell in cells if cell is not None]
    return "\n".join(filter(None, texts))


def _field(row: Mapping[str, Any], path: str, name: str, nullable: bool = False) -> Any:
    """Return the value of a field: the column `path`, or the value at a path with dots."""
    nullable = nullable or name == "system"
    if path in row:
        if row[path] is None and not nullable:
            raise BadRow(f"column {path} is null")
        return row[path]
    column, *keys = path.split(".")
    if column not in row:
        found = ", ".join(map(str, row))
        raise BadRow(f"column {column} is missing; the row has {found}{missing_hint(column)}")
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
    if value is None and name != "rejected" and not nullable:
        raise DroppedRow(f"no {name}")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{name} is {type(value).__name__}, expected text")
    return value


def _optional_text(value: Any, name: str) -> str | None:
    return None if value is None else _text(value, name)


def _number(value: Any, name: str) -> float:
    """Convert a number, or a number in text as in csv; it must be finite."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadRow(f"{name} is {value!r}, expected a finite number")
    return number


def _is_one(label: Any, name: str = "label") -> bool:
    number = _number(label, name)
    if number not in (0, 1):
        raise BadRow(f"{name} is {label!r}, expected 1 or 0")
    return number == 1


def _plain(prompt: Any, chosen: Any, rejected: Any = None) -> Record:
    """Texts with markers; a response that starts without a space gets one."""
    rejected = _optional_text(rejected, "rejected")
    return (
        parse_prompt(_text(prompt, "prompt")),
        _with_space(_text(chosen, "chosen")),
        None if rejected is None else _with_space(rejected),
    )


def _with_space(text: str) -> str:
    return text if not text or text[0].isspace() else f" {text}"


def _instruct(prompt: Any, chosen: Any, rejected: Any = None) -> Record:
    """An instruction and its responses, without markers."""
    rejected = _optional_text(rejected, "rejected")
    return (
        [("user", _text(prompt, "prompt"))],
        render_response(_text(chosen, "chosen")),
        None if rejected is None else render_response(rejected),
    )


def _last_turn(prompt: Any, chosen: Any, rejected: Any) -> Record:
    """A prompt without the final "Assistant:"; responses that repeat the whole dialogue."""
    return (
        parse_prompt(f"{_text(prompt, 'prompt').rstrip()}{RESPONSE}"),
        _text(chosen, "chosen").split("Assistant:")[-1],
        _text(rejected, "rejected").split("Assistant:")[-1],
    )


def _dialogues(chosen: Any, rejected: Any) -> Record:
    """Two dialogues that are equal up to their last responses."""
    chosen, rejected = _text(chosen, "chosen"), _text(rejected, "rejected")
    start, marker, response = chosen.rpartition(RESPONSE)
    prompt, other = f"{start}{marker}", rejected[len(start) + len(marker) :]
    if not marker:
        raise BadRow(f"chosen has no turn {RESPONSE.strip()!r}")
    if not rejected.startswith(prompt) or RESPONSE in other:
        raise DroppedRow("dialogues differ before the last response")
    return parse_prompt(prompt), response, other


def _scored(prompt: Any, first: Any, second: Any, first_score: Any, second_score: Any) -> Record:
    """Two responses, each with a score; the one with the higher score is chosen."""
    scores = _number(first_score, "first_score"), _number(second_score, "second_score")
    if scores[0] == scores[1]:
        raise DroppedRow("tie")
    return _labelled(prompt, first, second, scores[0] > scores[1])


def _labelled(prompt: Any, first: Any, second: Any, label: Any) -> Record:
    """Two responses; label is 1 if the first one is chosen, 0 if the second one is."""
    return _instruct(prompt, *((first, second) if _is_one(label) else (second, first)))


def _vicuna(prompt: Any, chosen: Any) -> Record:
    """Turns marked by "USER:" and "ASSISTANT:" in one text."""
    # White space separates turns from markers.
    start, *pieces = map(str.strip, re.split(r"\b(USER|ASSISTANT):", _text(prompt, "prompt")))
    roles = [ROLES[name.lower()] for name in pieces[::2]]
    turns = list(zip(roles, pieces[1::2], strict=True))
    if turns and turns[-1] == ("assistant", ""):
        turns.pop()
    if start:
        turns.insert(0, ("system", start))
    return _prompt(turns), _with_space(_text(chosen, "chosen")), None


def _turn(message: Any, name: str) -> Turn:
    """Return the turn of a message with role and content, or with from and value."""
    if not isinstance(message, dict):
        raise BadRow(
            f"{name} contains {type(message).__name__}, expected messages with role and content"
        )
    for key in UNSUPPORTED_KEYS:
        if message.get(key):
            raise BadRow(f"{name} has a turn with {key}, which is not supported")
    # Tables with both spellings leave one of them null.
    role = message.get("role") or message.get("from")
    text = message.get("value") if message.get("content") is None else message["content"]
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(f"{name} has a turn with role {role!r}, expected one of {', '.join(ROLES)}")
    if isinstance(text, list):
        text = _text_of_parts(text, name)
    return ROLES[role], _text(text, f"{name}: the text of a turn")


def _text_of_parts(parts: list[Any], name: str) -> str:
    """Return the text of a message whose content is a list of parts, all of them texts."""
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise BadRow(f"{name} has a turn with a part of type {kind!r}, expected text alone")
        texts.append(_text(part.get("text"), f"{name}: the text of a part"))
    return "".join(texts)


def _turns(value: Any, name: str, role_of_text: str) -> list[Turn]:
    """Return the turns of a list of messages, of one message, or of a text."""
    if isinstance(value, str):
        return [(role_of_text, value)]
    return [_turn(message, name) for message in (value if isinstance(value, list) else [value])]


def _check_weight(messages: Any, index: int) -> None:
    """Raise DroppedRow if a response has weight 0, as in files for OpenAI's fine-tuning."""
    message = messages[index] if isinstance(messages, list) else messages
    weight = message.get("weight") if isinstance(message, dict) else None
    if weight is not None and not _is_one(weight, "weight"):
        raise DroppedRow("response with weight 0")


def _prompt(turns: list[Turn], system: Any = None) -> list[Turn]:
    if system:
        turns = [("system", _text(system, "system")), *turns]
    if not any(role == "user" for role, _ in turns):
        raise DroppedRow("no prompt")
    return turns


def _messages(messages: Any, system: Any = None) -> Record:
    """A list of messages: the last response is chosen, the messages before it are the prompt."""
    turns = _turns(messages, "messages", "user")
    while turns and turns[-1][0] != "assistant":
        turns.pop()
    if not turns:
        raise DroppedRow("no response")
    _check_weight(messages, len(turns) - 1)
    return _prompt(turns[:-1], system), render_response(turns[-1][1]), None


def _message_pairs(chosen: Any, rejected: Any, prompt: Any = None, system: Any = None) -> Record:
    """Two lists of messages, each the whole dialogue or what follows the prompt."""
    question = [] if prompt is None else _turns(prompt, "prompt", "user")
    dialogues = []
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        turns = _turns(value, name, "assistant")
        if not turns or turns[-1][0] != "assistant":
            raise BadRow(f"{name} does not end with a response")
        _check_weight(value, -1)
        dialogues.append(turns if turns[0][0] != "assistant" else [*question, *turns])
    (*turns, (_, chosen)), (*others, (_, rejected)) = dialogues
    if turns != others:
        raise DroppedRow("dialogues differ before the last response")
    return _prompt(turns, system), render_response(chosen), render_response(rejected)


def _prompt_alone(prompt: Any, system: Any = None) -> Record:
    """A prompt without a response: an instruction, or a list of messages."""
    return _prompt(_turns(prompt, "prompt", "user"), system), None, None


def _unpaired(messages: Any, label: Any, system: Any = None) -> Record:
    """A dialogue and whether its response is good: it is chosen or rejected (KTO)."""
    is_good = _is_one(label)
    prompt, response, _ = _messages(messages, system)
    return (prompt, response, None) if is_good else (prompt, None, response)


def _same_names(*names: str) -> dict[str, str]:
    return {name: name for name in names}


PAIR = _same_names("prompt", "chosen", "rejected")
FORMATS = {
    "plain": Format(PAIR, _plain, optional=("rejected",)),
    "instruct": Format(PAIR, _instruct, optional=("rejected",)),
    "prompt": Format(_same_names("prompt"), _prompt_alone, ("system",), has_messages=True),
    "last_turn": Format(PAIR, _last_turn),
    "dialogues": Format(_same_names("chosen", "rejected"), _dialogues),
    "scored": Format(
        _same_names("prompt", "first", "second", "first_score", "second_score"), _scored
    ),
    "labelled": Format(_same_names("prompt", "first", "second", "label"), _labelled),
    "vicuna": Format({"prompt": "prompt", "chosen": "label"}, _vicuna),
    "messages": Format(_same_names("messages"), _messages, ("system",), has_messages=True),
    "message_pairs": Format(
        _same_names("chosen", "rejected"), _message_pairs, ("prompt", "system"), has_messages=True
    ),
    "sharegpt": Format({"messages": "conversations"}, _messages, ("system",), has_messages=True),
    "sharegpt_pairs": Format(
        {"prompt": "conversations", "chosen": "chosen", "rejected": "rejected"},
        _message_pairs,
        ("system",),
        has_messages=True,
    ),
    "kto": Format(_same_names("messages", "label"), _unpaired, ("system",), has_messages=True),
}
