"""Cells of a row of a source: texts, numbers, JSON, and messages of chat datasets as turns.

Standard library only: the workflow imports this module while it plans.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from snakechat.data.dialogues import (
    MESSAGE,
    THOUGHTS,
    TOOLS,
    UNTRAINED,
    Turn,
    is_trained,
    recorded_response,
)
from snakechat.workflow.printable import printable_line

# Characters of the reason why a row is bad.
MAX_REASON = 500

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


class BadRow(ValueError):
    """A row that does not have the format of its dataset; on_bad_row decides what happens."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable_line(reason, MAX_REASON))


class DroppedRow(Exception):
    """A valid row that gives no record. The message is the reason, under which it is counted."""


# --- texts, numbers and JSON ----------------------------------------------------------------


def checked_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{name} is {type(value).__name__}, expected text")
    return value


def checked_number(value: Any, name: str) -> float:
    """Convert a number, or a number in text as in csv; it must be finite."""
    with suppress(TypeError, ValueError, OverflowError):
        if math.isfinite(number := float(value)):
            return number
    raise BadRow(f"{name} is {value!r}, expected a finite number")


def is_one(label: Any, name: str = "label") -> bool:
    number = checked_number(label, name)
    if number not in (0, 1):
        raise BadRow(f"{name} is {label!r}, expected 1 or 0")
    return number == 1


def parse_json(text: str, problem: str = "invalid JSON") -> Any:
    """Return the value of a text; no object may have a key twice.

    Raises:
        BadRow: The text has no value. Its message is the problem with the reason.
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        reason = "nested too deeply"
    except json.JSONDecodeError as error:
        reason = f"{error}, found {text[error.pos : error.pos + 20] or text[:20]!r}"
    except ValueError as error:
        reason = str(error)
    raise BadRow(f"{problem}: {reason}")


def json_of(value: Any, name: str) -> str:
    """Return a value as JSON text, in the order of its keys."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BadRow(f"{name} has no JSON form: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # The json module keeps the last value.
    if len(found := dict(pairs)) == len(pairs):
        return found
    [(key, _), *_] = Counter(key for key, _ in pairs).most_common(1)
    raise ValueError(f"key {key!r} occurs twice in an object: keep one of them")


def check_columns(row: Mapping[str, Any], read: Collection[str]) -> None:
    """Raise BadRow for media, a system prompt or earlier turns in columns that are not read."""
    for key, value in row.items():
        may_be_missed = key not in read and (key in CONTEXT or MEDIA.fullmatch(key))
        if may_be_missed and not _is_empty(value):
            _reject_media("the row", key)
            raise BadRow(
                f"the row has {key}, which is not read: name it in `columns`, write the row as a"
                " list of messages, or remove the column"
            )


def _reject_media(place: str, key: str) -> None:
    if MEDIA.fullmatch(key):
        raise BadRow(f"{place} has {key}, and models read text alone: remove the row or the column")


def _is_empty(value: Any) -> bool:
    """Return whether a cell has nothing, as a table or a csv file writes it."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null", "None")
    if isinstance(value, dict):
        value = list(value.values())
    return all(map(_is_empty, value)) if isinstance(value, list) else value is None


# --- messages -------------------------------------------------------------------------------


def turns_of_messages(value: Any, name: str) -> list[Turn]:
    """Return the turns of a field: a list of messages, one message, or a text.

    Messages may be JSON text, as in csv files.
    """
    if isinstance(value, str):
        if name != "messages" and not (MESSAGES.match(value) and ROLE.search(value)):
            return [({"prompt": "user", "system": "system"}.get(name, "assistant"), value)]
        value = parse_json(value, f"{name} is text, but not JSON of messages")
    return [_turn(message, name) for message in (value if isinstance(value, list) else [value])]


def tools_turns(value: Any) -> list[Turn]:
    """Return the turn with the tools of a dialogue, as chat templates read them, if it has any."""
    tools = [{"type": "function", "function": each} for _, each in _functions(value, TOOLS)]
    return [(TOOLS, json_of(tools, TOOLS))] if tools else []


def response_of(turn: Turn) -> str:
    """Return the last turn of a dialogue as a response; raise DroppedRow if it has weight 0."""
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
    is_learned = _is_learned(message, name, "a turn")
    source_role = str(_one_of(message, ("role", "from"), name))
    if not (role := ROLES.get(source_role)):
        raise BadRow(
            f"{name} has a turn with role {source_role!r}, expected one of {', '.join(ROLES)}"
        )
    text = _one_of(message, ("content", "value"), name)
    calls = _one_of(message, ("tool_calls", "function_call"), name)
    if source_role in CALLS:
        calls, text = text, None
    calls = list(_calls(calls, name))
    if isinstance(text, list):
        text = "".join(_text_of_part(part, name) for part in text)
    text = "" if calls and text is None else checked_text(text, f"{name}: the text of a turn")
    more: dict[str, Any] = {}
    if thoughts := _one_of(message, THOUGHT_KEYS, name):
        if role != "assistant":
            raise BadRow(f"{name} has a turn of {role} with thoughts, expected them in responses")
        more[THOUGHTS] = checked_text(thoughts, f"{name}: the thoughts of a turn")
    if calls:
        more["tool_calls"] = calls
    elif role == "tool":
        more = {key: message[key] for key in RESULT_KEYS if message.get(key)}
    is_untrained = role == "assistant" and not is_learned
    if not more:
        return UNTRAINED if is_untrained else role, text
    weight = {"weight": 0} if is_untrained else {}
    return MESSAGE, json_of({"role": role, "content": text, **more, **weight}, name)


def _text_of_part(part: Any, name: str) -> str:
    """Return the text of a part of a message: in `text`, or in `value` as in LLaMA-Factory."""
    kind = part.get("type") or "text" if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise BadRow(f"{name} has a turn with a part of type {kind!r}, expected text alone")
    if not _is_learned(part, name, "a part"):
        raise BadRow(f"{name} has a part that is excluded from the loss: only whole turns can be")
    text = _one_of(part, ("text", "value"), name)
    if text is None:
        raise BadRow(f"{name} has a part without the key text or value; it has {', '.join(part)}")
    return checked_text(text, f"{name}: the text of a part")


def _is_learned(message: Mapping[str, Any], name: str, place: str) -> bool:
    """Return whether a message or a part counts: no weight of it is 0.

    Other keys that look like weights, thoughts or images make the row a bad one.
    """
    present = {key: value for key, value in message.items() if value is not None}
    weights = {key: is_one(value, key) for key, value in present.items() if key in WEIGHTS}
    for key, value in present.items():
        words = re.sub("(?<=[a-z])(?=[A-Z])", "_", key).lower()
        if key not in WEIGHTS and MASKS.search(words):
            raise BadRow(
                f"{name} has {place} with {key}, which looks like a mask of the loss: expected"
                " weight: 0 for a response that is not learned"
            )
        if _is_empty(value):
            continue
        _reject_media(f"{name}: {place}", key)
        is_thought = key not in THOUGHT_KEYS and THINKS.search(words)
        if is_thought and not isinstance(value, int | float):
            raise BadRow(f"{name} has {place} with {key}, expected thoughts in {THOUGHTS}")
    if len(set(weights.values())) > 1:
        raise BadRow(f"{name} has {place} whose {' and '.join(weights)} differ")
    return all(weights.values())


def _one_of(values: Mapping[str, Any], keys: Sequence[str], name: str) -> Any:
    """Return the value of keys with the same meaning: of the first one that is not empty.

    If all are empty, it is the first value; without any, None.
    """
    found = {key: values[key] for key in keys if values.get(key) is not None}
    filled = {key: value for key, value in found.items() if value}
    first = next(iter((filled or found).values()), None)
    if any(value != first for value in filled.values()):
        raise BadRow(f"{name} has {' and '.join(filled)}, which differ: remove one of them")
    return first


def _calls(value: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield calls of tools as chat templates read them, their arguments as an object."""
    for call, function in _functions(value, f"{name}: a call"):
        if unknown := function.keys() - CALL_KEYS:
            raise BadRow(
                f"{name} has a call with {', '.join(sorted(unknown))}, expected name and arguments"
            )
        place = f"{name}: the arguments of {function['name']}"
        objects = list(_objects(function.get("arguments") or {}, place))
        if len(objects) != 1:
            raise BadRow(f"{place} are {len(objects)} objects, expected one")
        own = {"id": call["id"]} if "id" in call else {}
        function = {"name": function["name"], "arguments": objects[0]}
        yield {**own, "type": "function", "function": function}


def _functions(value: Any, name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each object of a cell that is not empty, and the function that it defines or calls."""
    for each in filter(None, _objects(value, name)):
        function = each.get("function", each)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"{name} has no name of a function: {json_of(each, name)}")
        yield each, function


def _objects(value: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a cell: an object, a list of objects, or JSON text of these.

    Keys with a null value are dropped: in a table, each row has the keys of all rows. In JSON text,
    they are kept.
    """
    is_text = isinstance(value, str)
    if is_text:
        value = parse_json(value, f"{name} is text, but not JSON") if value else None
    for each in value if isinstance(value, list) else [] if value is None else [value]:
        if isinstance(each, str):
            yield from _objects(each, name)
        elif isinstance(each, dict):
            yield each if is_text else _without_nulls(each)
        else:
            raise BadRow(f"{name} is {type(each).__name__}, expected an object")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
