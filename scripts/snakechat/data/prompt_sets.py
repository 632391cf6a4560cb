"""Prompt sets: prompts/SET.yaml, a list of prompts, and prompts/pairs/SET.yaml, a list of prompts
with a chosen and a rejected response each.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from snakechat.workflow.errors import InputError
from snakechat.workflow.external_files import planned_files

# Keys of an entry of prompts/pairs.
PAIR_KEYS = ("prompt", "chosen", "rejected")


def read_prompts(
    prompt_sets: Iterable[str], files: Mapping[str, str], source: Path
) -> list[tuple[str, str]]:
    """Return (set, prompt) of each prompt of some sets.

    Args:
        prompt_sets: Names of the sets.
        files: Digests of their files by the path in the source.
        source: Folder of the Snakefile.

    Raises:
        InputError: A file changed after planning, or has an invalid entry.
    """
    entries = _read_entries("prompts", prompt_sets, files, source)
    for location, _, prompt in entries:
        _check_text(prompt, location)
    return [(name, prompt.strip()) for _, name, prompt in entries]


def read_pairs(
    prompt_sets: Iterable[str], files: Mapping[str, str], source: Path
) -> list[tuple[str, dict[str, str]]]:
    """Return (set, {prompt, chosen, rejected}) of each pair of some sets; see read_prompts.

    Raises:
        InputError: A file changed after planning, or has an invalid entry.
    """
    entries = _read_entries("prompts/pairs", prompt_sets, files, source)
    for location, _, pair in entries:
        if not isinstance(pair, dict) or sorted(pair) != sorted(PAIR_KEYS):
            raise InputError(
                f"{location}: expected the keys {', '.join(PAIR_KEYS)}, found {_describe(pair)}"
            )
        for key in PAIR_KEYS:
            _check_text(pair[key], f"{location}, {key}")
    return [(name, {key: pair[key].strip() for key in PAIR_KEYS}) for _, name, pair in entries]


def _read_entries(
    folder: str, prompt_sets: Iterable[str], files: Mapping[str, str], source: Path
) -> list[tuple[str, str, Any]]:
    """Return (location for errors, set, entry) of each entry of some sets in a folder."""
    entries = []
    for name in prompt_sets:
        file = f"{folder}/{name}.yaml"
        path = source / file
        try:
            with planned_files({path: files[file]}):
                content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
        if not isinstance(content, list) or not content:
            raise InputError(
                f"{path}: expected a list with one entry per prompt, each after a dash"
            )
        numbered = enumerate(content, start=1)
        entries += [(f"{path}, entry {number}", name, entry) for number, entry in numbered]
    return entries


def _check_text(value: Any, location: str) -> None:
    """Raise InputError if a value is not a string or is empty."""
    if not isinstance(value, str) or not value.strip():
        raise InputError(
            f"{location}: expected a text, found {_describe(value)}: put the text in quotes"
        )


def _describe(value: Any) -> str:
    """Describe a YAML value in a few words."""
    if isinstance(value, dict):
        return f"keys {', '.join(map(str, value))}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
