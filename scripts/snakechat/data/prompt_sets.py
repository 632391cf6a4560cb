"""Prompt sets: prompts/SET.yaml, a list of prompts, and prompts/pairs/SET.yaml, a list of prompts
with a chosen and a rejected response each.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from snakechat.data.limited_yaml import load_yaml
from snakechat.workflow.errors import InputError

# Keys of an entry of prompts/pairs.
PAIR_KEYS = ("prompt", "chosen", "rejected")


def read_prompts(prompt_sets: Iterable[str], source: Path) -> list[tuple[str, str]]:
    """Return (set, prompt) of each prompt of some sets in the folder of the Snakefile.

    Raises:
        InputError: A file has an invalid entry.
    """
    entries = _read_entries("prompts", prompt_sets, source)
    return [(name, _text(prompt, location)) for location, name, prompt in entries]


def read_pairs(prompt_sets: Iterable[str], source: Path) -> list[tuple[str, dict[str, str]]]:
    """Return (set, {prompt, chosen, rejected}) of each pair of some sets; see read_prompts."""
    pairs = []
    for location, name, pair in _read_entries("prompts/pairs", prompt_sets, source):
        if not isinstance(pair, dict) or pair.keys() != set(PAIR_KEYS):
            raise InputError(f"{location}: expected the keys {', '.join(PAIR_KEYS)}, found {pair}")
        pairs.append((name, {key: _text(pair[key], f"{location}, {key}") for key in PAIR_KEYS}))
    return pairs


def _read_entries(
    folder: str, prompt_sets: Iterable[str], source: Path
) -> Iterator[tuple[str, str, Any]]:
    """Yield (location for errors, set, entry) of each entry of some sets in a folder."""
    for name in prompt_sets:
        path = source / folder / f"{name}.yaml"
        try:
            content = load_yaml(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError) as error:
            raise InputError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
        if not isinstance(content, list) or not content:
            raise InputError(
                f"{path}: expected a list with one entry per prompt, each after a dash"
            )
        for number, entry in enumerate(content, start=1):
            yield f"{path}, entry {number}", name, entry


def _text(value: Any, location: str) -> str:
    """Return a text without the white space around it; raise InputError if there is none."""
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{location}: expected a text, found {value!r}: put the text in quotes")
    return value.strip()
