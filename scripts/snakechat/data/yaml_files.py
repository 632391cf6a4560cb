"""YAML of others, whose values can be constructed in time and in memory; prompt sets.

A short text may stand for billions of values, or for a number of a megabyte. Aliases (`*name`) and
merges (`<<: *name`) repeat values, each level of them as often as the text says; a number in base
60 (`1:30:00`) takes time that grows with the square of its length.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from snakechat.workflow.errors import InputError

# Digits of numbers: of longer integers, arbitrarily many have the same hash.
MAX_DIGITS = {"tag:yaml.org,2002:int": 20, "tag:yaml.org,2002:float": 1000}
# Values that aliases and merges may add to the text's own.
MAX_REPEATED = 100_000
MAX_DEPTH = 100

# Keys of an entry of prompts/pairs.
PAIR_KEYS = ("prompt", "chosen", "rejected")


def load_yaml(text: str) -> Any:
    """Return the values of a text.

    Raises:
        ValueError, yaml.YAMLError: As root_node.
        AttributeError, LookupError: The text of a tag such as !!timestamp is none.
    """
    root = root_node(text)
    return None if root is None else yaml.CSafeLoader("").construct_document(root)


def root_node(text: str) -> yaml.Node | None:
    """Return the nodes of a text, whose values can be constructed in time.

    Raises:
        ValueError: They cannot.
        yaml.YAMLError: The text is not YAML.
    """
    depth = 0
    # The parser composes nodes by recursion in C, without a limit.
    for event in yaml.parse(text, yaml.CSafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"values are nested in more than {MAX_DEPTH} levels")
    root = yaml.compose(text, yaml.CSafeLoader)
    if root is not None:
        _count(root, {}, len(text) + MAX_REPEATED)
    return root


def _count(node: yaml.Node, counts: dict[yaml.Node, float], limit: int) -> float:
    """Return how many values a node stands for; raise ValueError if there are more than `limit`.

    counts: The numbers of the nodes that were counted; infinity while one is being counted.
    """
    if node not in counts:
        counts[node] = math.inf
        children = chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        if isinstance(node, yaml.ScalarNode):
            digits, most, children = len(node.value), MAX_DIGITS.get(node.tag), ()
            if most is not None and digits > most:
                raise ValueError(f"a number has {digits:,} digits, at most {most:,}")
        counts[node] = 1 + sum(_count(child, counts, limit) for child in children)
    if counts[node] > limit:
        raise ValueError(
            f"aliases and merges (*NAME) repeat more than {MAX_REPEATED:,} values, or one contains"
            " itself: remove some"
        )
    return counts[node]


def read_prompts(
    prompt_sets: Iterable[str], folder: Path, keys: Sequence[str] = ("prompt",)
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (set, text by key) of each entry of some sets; a prompt alone has the key `prompt`.

    Args:
        prompt_sets: Names of files in the folder.
        folder: prompts/ with lists of prompts, or prompts/pairs/ with lists of prompts that have a
            chosen and a rejected response each.
        keys: Keys of an entry.

    Raises:
        InputError: A file has an invalid entry.
    """
    for name in prompt_sets:
        path = folder / f"{name}.yaml"
        try:
            content = load_yaml(path.read_text(encoding="utf-8")) or [None]
        except (yaml.YAMLError, ValueError, AttributeError, LookupError) as error:
            raise InputError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
        for number, entry in enumerate(content if isinstance(content, list) else [content], 1):
            texts = entry if isinstance(entry, dict) else {"prompt": entry}
            stripped = [text.strip() for text in texts.values() if isinstance(text, str)]
            if texts.keys() != set(keys) or not all(stripped) or len(stripped) < len(keys):
                raise InputError(
                    f"{path}, entry {number}: expected texts in quotes ({', '.join(keys)}), found"
                    f" {entry!r}"
                )
            yield name, {key: texts[key].strip() for key in keys}
