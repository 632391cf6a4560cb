"""Prompt sets: prompts/SET.yaml, a list of prompts, and prompts/pairs/SET.yaml, a list of prompts
with a chosen and a rejected response each.
"""

from pathlib import Path
from typing import Any

import yaml

from snakechat.workflow.errors import InputError
from snakechat.workflow.external_files import planned_files
from snakechat.workflow.job import Job

# Keys of an entry of prompts/pairs.
PAIR_KEYS = ("prompt", "chosen", "rejected")


def read_prompts(job: Job) -> list[tuple[str, str]]:
    """Return (set, prompt) of each prompt of the job's sets.

    Raises:
        InputError: A file changed after planning, or has an invalid entry.
    """
    entries = _read_entries(job, "prompts")
    for location, _, prompt in entries:
        _check_text(prompt, location)
    return [(name, prompt.strip()) for _, name, prompt in entries]


def read_pairs(job: Job) -> list[tuple[str, dict[str, str]]]:
    """Return (set, {prompt, chosen, rejected}) of each pair of the job's sets.

    Raises:
        InputError: A file changed after planning, or has an invalid entry.
    """
    entries = _read_entries(job, "prompts/pairs")
    for location, _, pair in entries:
        if not isinstance(pair, dict) or sorted(pair) != sorted(PAIR_KEYS):
            raise InputError(
                f"{location}: expected the keys {', '.join(PAIR_KEYS)}, found {_describe(pair)}"
            )
        for key in PAIR_KEYS:
            _check_text(pair[key], f"{location}, {key}")
    return [(name, {key: pair[key].strip() for key in PAIR_KEYS}) for _, name, pair in entries]


def _read_entries(job: Job, folder: str) -> list[tuple[str, str, Any]]:
    """Return (location for errors, set, entry) of each entry of the sets in the job's settings."""
    entries = []
    for name in job.settings.prompt_sets:
        file = f"{folder}/{name}.yaml"
        path = Path(job.placement["source"], file)
        try:
            with planned_files({path: job.spec["files"][file]}):
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
