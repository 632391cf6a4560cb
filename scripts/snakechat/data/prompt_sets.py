"""Prompt sets: prompts/SET.yaml, a list of prompts, and prompts/pairs/SET.yaml, a list of prompts
with a chosen and a rejected response each.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from snakechat.data.limited_yaml import load_yaml
from snakechat.workflow.errors import InputError

# Keys of an entry of prompts/pairs.
PAIR_KEYS = ("prompt", "chosen", "rejected")


def read_prompts(
    prompt_sets: Iterable[str], folder: Path, keys: Sequence[str] = ("prompt",)
) -> list[tuple[str, dict[str, str]]]:
    """Return (set, text by key) of each entry of some sets; a prompt alone has the key `prompt`.

    Raises:
        InputError: A file has an invalid entry.
    """
    entries = []
    for name in prompt_sets:
        path = folder / f"{name}.yaml"
        try:
            content = load_yaml(path.read_text(encoding="utf-8")) or [None]
        except (yaml.YAMLError, ValueError) as error:
            raise InputError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
        for number, entry in enumerate(content if isinstance(content, list) else [content], 1):
            texts = entry if isinstance(entry, dict) else {"prompt": entry}
            stripped = [text.strip() for text in texts.values() if isinstance(text, str)]
            if texts.keys() != set(keys) or not all(stripped) or len(stripped) < len(keys):
                raise InputError(
                    f"{path}, entry {number}: expected texts in quotes ({', '.join(keys)}), found"
                    f" {entry!r}"
                )
            entries.append((name, {key: texts[key].strip() for key in keys}))
    return entries
