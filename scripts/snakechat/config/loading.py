"""Load the config: values of the command line, the schema, sweeps, all checks."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from snakechat.config.cross_checks import check_placements, check_references
from snakechat.config.errors import ConfigError
from snakechat.config.recipes import Config
from snakechat.config.schema import SETTINGS, checked, checked_recipe
from snakechat.config.sections import Sections

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
    check_plain_values(values)
    values |= checked(values, Sections)
    config = Config(values, root, sources)
    check_presets(config)
    add_sweeps(config)
    check_references(config)
    check_placements(config)
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


def check_plain_values(values: Any, *place: str) -> None:
    """Raise ConfigError for a value that specs cannot have, which are JSON.

    Examples are infinity, a date, and half of a surrogate pair.
    """
    if isinstance(values, dict):
        for key, value in values.items():
            check_plain_values(value, *place, str(key))
    elif isinstance(values, list):
        for number, value in enumerate(values):
            check_plain_values(value, *place, str(number))
    else:
        try:
            json.dumps(values, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError):
            raise ConfigError(
                f"config: {'.'.join(place)}: expected text in UTF-8, a finite number, true, false"
                f" or null, found {values!r}: quote it, or use another value"
            ) from None


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
    """Add the recipes of all sweeps to their stages."""
    for sweep, settings in config.values["sweeps"].items():
        stage = settings["stage"]
        recipes = config.values[stage]["recipes"]
        if sweep in recipes:
            raise ConfigError(
                f"config: sweeps.{sweep} has the name of a recipe of {stage}: rename it"
            )
        swept = config.sweep_recipes(sweep)
        # A mistake of its own is reported at its place.
        config.recipe(stage, settings["recipe"])
        for name, recipe in swept.items():
            if name in recipes:
                raise ConfigError(f"config: sweeps.{sweep} makes recipe {name}, which exists")
            checked_recipe(stage, config.layers(stage, f"sweeps.{sweep}.over", recipe))
            recipes[name] = recipe


def check_presets(config: Config) -> None:
    """Check the defaults of each stage, and its presets, whether or not a recipe uses them."""
    for stage in SETTINGS:
        section = config.values[stage]
        checked_recipe(stage, config.layers(stage, f"{stage}.defaults", {}), is_whole=False)
        for name, preset in section.get("presets", {}).items():
            if "preset" in preset:
                raise ConfigError(f"config: {stage}.presets.{name}.preset: a preset has none")
            checked_recipe(
                stage, config.layers(stage, f"{stage}.presets.{name}", preset), is_whole=False
            )
