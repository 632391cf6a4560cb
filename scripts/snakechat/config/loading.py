"""Load the config: the text of its files, values of the command line, sweeps, all checks.

Snakemake reads the files. Of a key that is written twice, it keeps the last value, and its error of
a file that cannot be parsed names neither the file nor the line.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from snakechat.config.cross_checks import check_references
from snakechat.config.recipes import Config
from snakechat.config.schema import ConfigError, checked, checked_recipe
from snakechat.config.sections import Sections
from snakechat.data.limited_yaml import root_node

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
    except (ValueError, LookupError, AttributeError) as error:
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
    message = f"line {mark.line + 1} is not YAML: {problem}: correct this line or those before it"
    for number in range(max(0, mark.line - 1), min(mark.line + 1, len(lines))):
        if found := FULL_WIDTH.search(lines[number].partition(" #")[0]):
            message += f" (line {number + 1} has the full-width character {found[0]!r})"
    return message


def _check_keys(name: str, node: yaml.Node, path: str = "") -> None:
    """Raise ConfigError for the first mapping that has a key twice, or text with a NUL."""
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
    elif "\0" in node.value:
        raise ConfigError(f"{name}: {path[:-1]} has the character NUL: remove it")


# Keys whose values are text, even if they look like numbers: a commit may consist of digits.
TEXT_KEYS = {"revision"}


def load_config(
    values: dict[str, Any], root: Path, sources: Path, command_line: dict[str, Any]
) -> Config:
    """Return the checked config.

    Args:
        values: config.yaml with the config files of the user on top. It is updated in place.
        root: The folder of the Snakefile, which relative paths start from.
        sources: The folder of the code: of rewards/ and the locked requirements.
        command_line: What --config set, as Snakemake parsed it.

    Raises:
        ConfigError: A key or value is invalid, or a name refers to nothing.
    """
    update(values, parse_command_line_values(command_line))
    values |= checked(values, Sections)
    config = Config(values, root, sources)
    add_sweeps(config)
    check_references(config)
    return config


def parse_command_line_values(value: Any) -> Any:
    """Return values of the command line with numbers, booleans and nulls read as YAML.

    Snakemake does not parse scalars inside braces: --config 'sft={defaults: {epochs: 2}}'.
    """
    if isinstance(value, dict):
        return {
            key: item if key in TEXT_KEYS else parse_command_line_values(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [parse_command_line_values(item) for item in value]
    if not isinstance(value, str):
        return value
    loader = yaml.SafeLoader("")
    tag = loader.resolve(yaml.ScalarNode, value, (True, False))
    return loader.construct_object(yaml.ScalarNode(tag, value))


def update(values: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Update nested values in place; keys that changes does not name stay.

    Mappings are copied, so that two keys that share one (an alias in YAML) do not change together.
    """
    for key, change in changes.items():
        if isinstance(change, Mapping):
            if not isinstance(values.get(key), dict):
                values[key] = {}
            update(values[key], change)
        else:
            values[key] = change


def add_sweeps(config: Config) -> None:
    """Add the recipes of all sweeps to their stages.

    They have no gate of the recipe: a sweep explores.
    """
    for sweep, settings in config.values["sweeps"].items():
        stage = settings["stage"]
        recipes = config.values[stage]["recipes"]
        if sweep in recipes:
            raise ConfigError(
                f"config: sweeps.{sweep} has the name of a recipe of {stage}: rename it"
            )
        origin = config.entry(f"{stage}.recipes", settings["recipe"], f"sweeps.{sweep}.recipe")
        # A mistake of its own is reported at its place.
        config.recipe(stage, settings["recipe"])
        for name, changes in config.swept_settings[sweep].items():
            if name in recipes:
                raise ConfigError(f"config: sweeps.{sweep} makes recipe {name}, which exists")
            recipes[name] = {key: origin[key] for key in origin if key != "gate"} | changes
            checked_recipe(stage, config.layers(stage, f"sweeps.{sweep}.over", recipes[name]))
