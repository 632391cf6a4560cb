"""The text of the config's files: what the parsed values no longer show.

Snakemake reads the files. Of a key that is written twice, it keeps the last value, and its error of
a file that cannot be parsed names neither the file nor the line.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from snakechat.config.errors import ConfigError
from snakechat.workflow.limited_yaml import root_node

# `<<: *name` takes over the keys of another mapping; several ones add up.
MERGE = "tag:yaml.org,2002:merge"
# Spaces and punctuation of Chinese input methods that look like YAML's.
FULL_WIDTH = re.compile(r"[\u3000\uff0c\uff1a\uff3b\uff3d\uff5b\uff5d\u3010\u3011\u201c\u201d]")

# Files of the project below the folder of the Snakefile, in the order in which they are read.
FILES = ("config.yaml", "config/recipes.yaml", "config/deepspeed_chat.yaml")


def project_files(root: Path) -> list[Path]:
    """Return the config files of the project in a folder, which --configfile changes."""
    return [root / file for file in FILES]


def check_config_files(paths: Iterable[Path]) -> None:
    """Check files before Snakemake's values of them are used. A missing file is not an error here.

    Raises:
        ConfigError: A file is not YAML in UTF-8, which JSON is too, or a mapping has a key twice or
            contains itself.
    """
    for path in paths:
        if path.exists():
            check_config_text(path.name, path.read_bytes())


def check_config_text(name: str, content: bytes) -> None:
    """Check the content of one file.

    Raises:
        ConfigError: See check_config_files.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name}: byte {error.start + 1} is not UTF-8: save the file as text in UTF-8"
        ) from None
    try:
        root = root_node(text)
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{name}: expected sections such as `sft:`, and it has none")
        _check_keys(name, root)
        yaml.CSafeLoader("").construct_document(root)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: {_describe(error, text)}") from None
    except (ValueError, LookupError) as error:
        # Too many values, or some that have the form of a date or a number, and are none.
        raise ConfigError(f"{name}: a value cannot be read: {error}") from None


def _describe(error: yaml.YAMLError, text: str) -> str:
    """Return where YAML has an error, and what it is, in one line."""
    mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return f"not YAML: {error}"
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return f"line {mark.line + 1} is indented with a tab: use spaces"
    problem = getattr(error, "problem", None) or error
    hint = ""
    for number in range(max(0, mark.line - 1), min(mark.line + 1, len(lines))):
        if found := FULL_WIDTH.search(lines[number].partition(" #")[0]):
            hint = f" (line {number + 1} has the full-width character {found[0]!r})"
    return (
        f"line {mark.line + 1} is not YAML: {problem}: correct this line or those before it{hint}"
    )


def _check_keys(name: str, node: yaml.Node, path: str = "") -> None:
    """Raise ConfigError for the first mapping that has a key twice."""
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            _check_keys(name, item, f"{path}{number}.")
    elif isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            written, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if written in lines and key.tag != MERGE:
                raise ConfigError(
                    f"{name}: {path}{key.value} is written twice, in lines {lines[written]} and"
                    f" {line}: keep one of them, the first one would be ignored"
                )
            lines[written] = line
            _check_keys(name, value, f"{path}{key.value}.")
