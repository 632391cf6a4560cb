"""Bounds of rows of source files, and their form: what exceeds them is a bad row.

The rows of a dataset come from strangers. Bounds keep a hostile file from exhausting the memory of
an import; real rows are far below them.
"""

import json
from typing import Any

from snakechat.data.formats import BadRow

# Bytes of a row: of a line, of an item of an array, of a record of csv, of the cells of a table. A
# row of JSON takes up to 30 times its length in memory.
MAX_ROW_BYTES = 16 << 20
# Bytes that the rows of a batch of a table may have before they are decoded.
MAX_BATCH_BYTES = 64 << 20
# Levels of lists and objects within a row.
MAX_DEPTH = 100
# Integers are limited to 4,300 digits by Python itself.


def row_of_json(text: str) -> Any:
    """Return the value of a JSON text within the bounds, or a BadRow."""
    try:
        return checked_row(json.loads(text), text)
    except RecursionError:
        return nested_too_deeply()
    except ValueError as error:
        return InvalidJson(f"invalid JSON: {error}")


def checked_row(row: Any, text: str) -> Any:
    """Return a parsed row, or a BadRow if it is nested too deeply or not Unicode.

    text: The JSON text that the row was parsed from.
    """
    # Counting is fast; few rows have as many brackets.
    has_many = text.count("[") + text.count("{") > MAX_DEPTH
    if has_many and isinstance(row, (list, dict)) and depth_of(row) > MAX_DEPTH:
        return nested_too_deeply()
    if "\\ud" in text or "\\uD" in text:
        # Half of a surrogate pair is valid JSON, but cannot be encoded.
        try:
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            return InvalidJson(f"invalid JSON: {error}")
    return row


def depth_of(value: Any) -> int:
    """Return the number of levels of lists and dicts, at most MAX_DEPTH + 1."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, dict) else item)
            if isinstance(inner, (list, dict))
        ]
    return depth


class InvalidJson(BadRow):
    """A row that is not JSON."""


def too_long() -> BadRow:
    """Return the bad row in place of one with more than MAX_ROW_BYTES."""
    return BadRow(f"longer than {MAX_ROW_BYTES:,} bytes, the limit for a row")


def nested_too_deeply() -> BadRow:
    """Return the bad row in place of one with more than MAX_DEPTH levels."""
    return BadRow(f"nested deeper than {MAX_DEPTH} levels, the limit for a row")


def not_utf8(piece: bytes | str) -> BadRow:
    """Return the bad row in place of one whose text is not UTF-8; piece: where it is not."""
    return BadRow(f"text that is not UTF-8: {piece!r}")
