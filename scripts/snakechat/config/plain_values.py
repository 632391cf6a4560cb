"""Values that the config may have at all: what YAML can express and JSON cannot is an error.

Specs are JSON. A number that is not finite, a date or text that is not Unicode would fail there,
far from the key.
"""

import math
from collections.abc import Iterator
from typing import Any

from snakechat.config.errors import ConfigError

# More levels of mappings and lists than any key has.
MAX_DEPTH = 50
# Programs count in 64 bits.
LARGEST = 2**63 - 1


def check_plain_values(values: dict[str, Any]) -> None:
    """Raise ConfigError for the first value or key that no key of the config can have.

    They are numbers that are not finite or need more than 64 bits, dates, binary data and sets,
    text with a null character or half of a surrogate pair, keys that are not text, and mappings
    that are nested too deeply or contain themselves.
    """
    stack = [_items(values, ())]
    while stack:
        for path, key_problem, value in stack[-1]:
            problem = key_problem or _problem(value)
            if len(path) > MAX_DEPTH:
                problem = f"more than {MAX_DEPTH} levels deep"
            if problem:
                raise ConfigError(f"config: {'.'.join(map(shown_key, path[:8]))}: {problem}")
            if isinstance(value, dict | list):
                stack.append(_items(value, path))
                break
        else:
            stack.pop()


def _items(
    value: dict[Any, Any] | list[Any], path: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], str | None, Any]]:
    """Yield the path of each item of a mapping or list, what is wrong with its key, and its value.

    A list has numbers in the place of keys.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key), _key_problem(key), item
    else:
        for number, item in enumerate(value):
            yield (*path, number), None, item


def shown_key(key: Any) -> str:
    """Return a key for an error, short and without control characters."""
    text = str(key)[:100]
    return text if text.isprintable() else repr(text)


def _key_problem(key: Any) -> str | None:
    """Return what is wrong with a key of a mapping."""
    if isinstance(key, str):
        return _text_problem(key)
    return f"the key {_kind(key)}, expected text: quote it"


def _problem(value: Any) -> str | None:
    """Return what is wrong with a value, apart from its items."""
    if value is None or isinstance(value, bool | dict | list):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{value} is not a finite number"
    if isinstance(value, int):
        is_small = -LARGEST <= value <= LARGEST
        return None if is_small else "a number of more than 64 bits"
    if isinstance(value, str):
        return _text_problem(value)
    return f"{_kind(value)}, expected text, a number, a list or a mapping: quote it"


def _text_problem(text: str) -> str | None:
    """Return why neither a file name nor a spec can have a text."""
    if "\0" in text:
        return "text with a null character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "text with half of a surrogate pair, which is not Unicode"
    return None


def _kind(value: Any) -> str:
    return f"{str(value)[:60]!r} is of type {type(value).__name__}"
