"""Cells of a row of a source: checked texts and numbers. Standard library only."""

import math
from typing import Any

from snakechat.workflow.printable import printable_line

# Characters of the reason why a row is bad.
MAX_REASON = 500


class BadRow(Exception):
    """A row that does not have the format of its dataset; on_bad_row decides what happens."""

    def __init__(self, reason: str) -> None:
        super().__init__(printable_line(reason, MAX_REASON))


class DroppedRow(Exception):
    """A valid row that gives no record. The message is the reason, under which it is counted."""


def checked_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{name} is {type(value).__name__}, expected text")
    return value


def optional_text(value: Any, name: str) -> str | None:
    return None if value is None else checked_text(value, name)


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
