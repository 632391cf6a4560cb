"""Messages of chat datasets as turns: roles, texts, weights, tools and their calls.

Standard library only: the workflow imports this module while it plans.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from snakechat.data.cells import BadRow, DroppedRow, checked_text, is_one, parse_json
from snakechat.data.dialogues import (
    MESSAGE,
    THOUGHTS,
    TOOLS,
    UNTRAINED,
    Turn,
    is_trained,
    recorded_response,
)

# Roles of ShareGPT and ms-swift whose text is a call.
CALLS = ("function_call", "tool_call")
# Roles in sources, by their names in lower case.
ROLES = {
    **dict.fromkeys(["system", "developer"], "system"),
    **dict.fromkeys(["user", "human"], "user"),
    **dict.fromkeys(["assistant", "gpt", "model", *CALLS], "assistant"),
    **dict.fromkeys(["tool", "function", "observation", "tool_response"], "tool"),
}

# Keys of messages with the thoughts that precede a response.
THOUGHT_KEYS = (THOUGHTS, "reasoning", "thinking")
# What other keys look like that have them.
THINKS = re.compile(r"(?<![a-z])(thoughts?|think(ing)?|reasonings?|rationales?|cot)(?![a-z])")
# Keys that say whether a response is learned: of OpenAI, LLaMA-Factory, axolotl and ms-swift.
WEIGHTS = ("weight", "loss_weight", "train", "loss")
# What other keys look like that do, or the opposite of it.
MASKS = re.compile(
    r"(?<![a-z])(un|non?|not)?(weight|train|loss|mask|learn|supervis|ignor|skip|exclud|gradient"
    r"|backprop|grad(?![ei]))(s|es|e|p?ed|able|ing|ion)?(?![a-z])"
)
# Columns of a row, and keys of messages and parts, that have more than text.
MEDIA = re.compile(
    r"((input|chosen|rejected)[ _-]?)?(image|img|picture|photo|video|audio)s?([ _-]?(\d+|(url|uri"
    r"|path|file(name)?|bytes|base64|b64|data|array|list)s?))?",
    re.IGNORECASE,
)
# Columns of a row with what comes before its question, in Alpaca, ShareGPT and ms-swift's rows.
CONTEXT = ("system", "history")
# Keys of a call, or of its function.
CALL_KEYS = {"name", "arguments", "id", "type", "index", "call_id"}
# Keys of the result of a call that some chat templates write.
RESULT_KEYS = ("name", "tool_call_id")
# Text of a list of messages, or of one message.
MESSAGES = re.compile(r"""\s*(\[\s*)?\{\s*["'](role|from|content|value)["']\s*:""")
ROLE = re.compile(r"""["'](role|from)["']\s*:""")


def turns_of_messages(value: Any, name: str, role_of_text: str) -> list[Turn]:
    """Return the turns of a list of messages, of one message, or of a text.

    Messages may be JSON text, as in csv files.

    Raises:
        BadRow: A message has an unknown role, no text, or thoughts or calls that cannot be read.
    """
    if isinstance(value, str):
        if name != "messages" and not (MESSAGES.match(value) and ROLE.search(value)):
            return [(role_of_text, value)]
        value = _parsed(value, name, "JSON of messages")
    return [_turn(message, name) for message in (value if isinstance(value, list) else [value])]


def tools_turns(value: Any) -> list[Turn]:
    """Return the turn with the tools of a dialogue, as chat templates read them; none without any.

    Raises:
        BadRow: The cell has no definitions of tools.
    """
    tools = []
    for tool in filter(None, _objects(value, TOOLS)):
        function = tool.get("function", tool)
        if not isinstance(function, dict) or "name" not in function:
            raise BadRow(f"{TOOLS} has a tool without the name of a function: {_json(tool)}")
        tools.append({"type": "function", "function": function})
    return [(TOOLS, _json(tools))] if tools else []


def response_of(turn: Turn) -> str:
    """Return the last turn of a dialogue as a response.

    Raises:
        DroppedRow: It has weight 0.
    """
    if not is_trained(turn):
        raise DroppedRow("response with weight 0")
    return recorded_response(turn)


def _turn(message: Any, name: str) -> Turn:
    """Return the turn of a message with role and content, or with from and value.

    A message with thoughts or calls of tools is JSON as transformers documents it, and so is the
    result of a call with RESULT_KEYS.
    """
    if not isinstance(message, dict):
        raise BadRow(
            f"{name} contains {type(message).__name__}, expected messages with role and content"
        )
    check_media(message, f"{name}: a turn")
    is_learned = _is_learned(message, name)
    source_role = _one_of(message, ("role", "from"), name)
    text = _one_of(message, ("content", "value"), name)
    if not isinstance(source_role, str) or source_role not in ROLES:
        raise BadRow(
            f"{name} has a turn with role {source_role!r}, expected one of {', '.join(ROLES)}"
        )
    role = ROLES[source_role]
    calls = _one_of(message, ("tool_calls", "function_call"), name)
    if source_role in CALLS:
        calls, text = text, None
    calls = _calls(calls, name)
    if isinstance(text, list):
        text = _text_of_parts(text, name)
    text = "" if calls and text is None else checked_text(text, f"{name}: the text of a turn")
    more: dict[str, Any] = {}
    if thoughts := _thoughts(message, role, name):
        more[THOUGHTS] = thoughts
    if calls:
        more["tool_calls"] = calls
    elif role == "tool":
        more = {key: message[key] for key in RESULT_KEYS if message.get(key)}
    if role == "assistant" and not is_learned:
        if not more:
            return UNTRAINED, text
        more["weight"] = 0
    if not more:
        return role, text
    return MESSAGE, _json({"role": role, "content": text, **more})


def _one_of(values: Mapping[str, Any], keys: Sequence[str], name: str) -> Any:
    """Return the value of keys with the same meaning: the first that is not empty, or None.

    Raises:
        BadRow: Several have a value, and these differ.
    """
    found = {key: values[key] for key in keys if values.get(key) is not None}
    filled = {key: value for key, value in found.items() if value}
    first = next(iter((filled or found).values()), None)
    if any(value != first for value in filled.values()):
        raise BadRow(f"{name} has {' and '.join(filled)}, which differ: remove one of them")
    return first


def _thoughts(message: Mapping[str, Any], role: str, name: str) -> str | None:
    """Return the thoughts of a message, or None if it has none.

    Raises:
        BadRow: They are not text, occur twice and differ, or do not belong to a response.
    """
    for key, value in message.items():
        is_thought = key not in THOUGHT_KEYS and THINKS.search(_words(key))
        if is_thought and not isinstance(value, int | float) and not _is_empty(value):
            raise BadRow(f"{name} has a turn with {key}, expected thoughts in {THOUGHTS}")
    thoughts = _one_of(message, THOUGHT_KEYS, name)
    if thoughts and role != "assistant":
        raise BadRow(f"{name} has a turn of {role} with thoughts, expected them in responses alone")
    return checked_text(thoughts, f"{name}: the thoughts of a turn") if thoughts else None


def _text_of_parts(parts: list[Any], name: str) -> str:
    """Return the text of a message whose content is a list of parts, all of them texts.

    A part has its text in `text`, or in `value` as in LLaMA-Factory.
    """
    texts = []
    for part in parts:
        kind = part.get("type") or "text" if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise BadRow(f"{name} has a turn with a part of type {kind!r}, expected text alone")
        check_media(part, f"{name}: a part")
        if not _is_learned(part, name):
            raise BadRow(f"{name} has a part that is not learned: turns alone can be left out")
        text = _one_of(part, ("text", "value"), name)
        if text is None:
            raise BadRow(
                f"{name} has a part without the key text or value; it has {', '.join(part)}"
            )
        texts.append(checked_text(text, f"{name}: the text of a part"))
    return "".join(texts)


def check_media(cells: Mapping[str, Any], place: str, mapped: Collection[str] = ()) -> None:
    """Raise BadRow for a column or key with images, videos or audio: a model would not see them.

    mapped: Columns that are read as text.
    """
    for key, value in cells.items():
        if MEDIA.fullmatch(key) and key not in mapped and not _is_empty(value):
            raise BadRow(
                f"{place} has {key}, and models read text alone: remove the row or the column"
            )


def check_context(
    cells: Mapping[str, Any], mapped: Collection[str], fields: Collection[str]
) -> None:
    """Raise BadRow for a system prompt or earlier turns in a column that `columns` does not name.

    Args:
        cells: A row.
        mapped: Columns that are read.
        fields: The fields of the format of the row.
    """
    for key in CONTEXT:
        if key not in mapped and not _is_empty(cells.get(key)):
            todo = (
                f"add `{key}: {key}` to `columns`"
                if key in fields
                else "write the row as a list of messages"
            )
            raise BadRow(f"the row has {key}, which is not read: {todo}, or remove the column")


def _is_empty(value: Any) -> bool:
    """Return whether a cell has nothing, as a table or a csv file writes it."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null", "None")
    if isinstance(value, (list, dict)):
        return all(map(_is_empty, value.values() if isinstance(value, dict) else value))
    return value is None


def _is_learned(message: Mapping[str, Any], name: str) -> bool:
    """Return whether a response counts: no weight of it is 0.

    Raises:
        BadRow: A weight is neither 0 nor 1, two of them differ, or another key looks like a weight.
    """
    weights = {}
    for key, value in message.items():
        if value is None or not MASKS.search(_words(key)):
            continue
        if key not in WEIGHTS:
            raise BadRow(
                f"{name} has a turn with {key}, which looks like a mask of the loss: expected"
                " weight: 0 for a response that is not learned"
            )
        weights[key] = is_one(value, key)
    if len(set(weights.values())) > 1:
        raise BadRow(f"{name} has a turn whose {' and '.join(weights)} differ")
    return all(weights.values())


def _words(key: str) -> str:
    """Return a key in lower case, with _ in front of what were capital letters."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", key).lower()


def _calls(value: Any, name: str) -> list[dict[str, Any]]:
    """Return calls of tools as chat templates read them, their arguments as an object."""
    calls = []
    for call in _objects(value, f"{name}: a call"):
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"{name} has a call without the name of a function: {_json(call)}")
        if unknown := function.keys() - CALL_KEYS:
            raise BadRow(
                f"{name} has a call with {', '.join(sorted(unknown))}, expected name and arguments"
            )
        place = f"{name}: the arguments of {function['name']}"
        objects = _objects(function.get("arguments") or {}, place)
        if len(objects) != 1:
            raise BadRow(f"{place} are {len(objects)} objects, expected one")
        own = {"id": call["id"]} if "id" in call else {}
        function = {"name": function["name"], "arguments": objects[0]}
        calls.append({**own, "type": "function", "function": function})
    return calls


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    """Return the objects of a cell: an object, a list of objects, or JSON text of these.

    Keys with a null value are left out, because a table gives each row the keys of all rows; those
    of JSON text stay.
    """
    is_text = isinstance(value, str)
    if is_text:
        value = _parsed(value, name) if value else None
    found = []
    for each in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(each, str):
            found += _objects(each, name)
        elif isinstance(each, dict):
            found.append(each if is_text else _without_nulls(each))
        else:
            raise BadRow(f"{name} is {type(each).__name__}, expected an object")
    return found


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _parsed(text: str, name: str, expected: str = "JSON") -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise BadRow(f"{name} is text, but not {expected}: {error}") from None


def _json(value: Any) -> str:
    """Return a value as JSON text, in the order of its keys."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadRow(f"a message or a tool has no JSON form: {error}") from None
