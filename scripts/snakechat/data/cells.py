"""Cells of a row of a source: checked texts and numbers, and JSON. Standard library only."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snakechat.workflow.errors import InputError
from snakechat.workflow.printable import printable_line

# Characters of the reason why a row is bad.
MAX_REASON = 500


class BadRow(Exception):
    """A row that does not have the format of its dataset; on_bad_row decides what happens."""

    def __init__(self, reason: str) -> None:
        self.reason = printable_line(reason, MAX_REASON)
        super().__init__(self.reason)


class DroppedRow(Exception):
    """A valid row that gives no record. The message is the reason, under which it is counted."""


def checked_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{name} is {type(value).__name__}, expected text")
    return value


def checked_number(value: Any, name: str) -> float:
    """Convert a number, or a number in text as in csv; it must be finite."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadRow(f"{name} is {value!r}, expected a finite number")
    return number


def is_one(label: Any, name: str = "label") -> bool:
    number = checked_number(label, name)
    if number not in (0, 1):
        raise BadRow(f"{name} is {label!r}, expected 1 or 0")
    return number == 1


class JsonDecoder(json.JSONDecoder):
    """Notes a key that an object has twice, of which the json module keeps the last value.

    Attributes:
        problem: Why the value that was decoded last is ambiguous, or an empty text.
    """

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=self._object)
        self.problem = ""

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        """Return the value at a position of a text, and the position of its end."""
        self.problem = ""
        return super().raw_decode(s, idx)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
            self.problem = f"key {twice!r} occurs twice in an object: keep one of them"
        return found


def parse_json(text: str) -> Any:
    """Return the value of a text.

    Raises:
        ValueError: The text is not JSON or nested too deeply, or an object has a key twice.
    """
    decoder = JsonDecoder()
    try:
        value = decoder.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        found = text[error.pos : error.pos + 20] or text[:20]
        raise ValueError(f"{error}, found {found!r}") from None
    if decoder.problem:
        raise ValueError(decoder.problem)
    return value


def check_names(path: Path, names: Sequence[str]) -> None:
    """Raise InputError if a file has two columns of a name: a row would keep one of them."""
    twice = [name for name, number in Counter(names).items() if number > 1]
    if twice:
        raise InputError(f"{path}: column {twice[0]} occurs twice: rename one of them")
