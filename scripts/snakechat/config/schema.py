"""The check of the config by its models, its errors as one line, and its schema."""

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from snakechat.config.dpo import DpoSettings
from snakechat.config.errors import ConfigError
from snakechat.config.rlhf import GenerationSettings, RlhfSettings
from snakechat.config.sections import GenerationKeys, RlhfKeys, Sections, TrainingKeys
from snakechat.config.settings import Settings
from snakechat.config.training_settings import RewardSettings, SftSettings

SETTINGS: dict[str, type[Settings]] = {
    "sft": SftSettings,
    "reward": RewardSettings,
    "dpo": DpoSettings,
    "rlhf": RlhfSettings,
    "generations": GenerationSettings,
}
# Keys of recipes besides the settings of their programs.
FURTHER_KEYS: dict[str, type[Settings]] = {
    **dict.fromkeys(("sft", "reward", "dpo"), TrainingKeys),
    "rlhf": RlhfKeys,
    "generations": GenerationKeys,
}
# Fields of settings that the models and judges of a recipe determine.
DETERMINED = ("template", "reward_templates", "llm_judges")

Schema = dict[str, Any]


class Layer(NamedTuple):
    """Keys of a recipe from one place: the defaults, a preset, or the recipe itself."""

    place: str
    keys: Mapping[str, Any]


def checked(values: Any, declared: Any, *place: str) -> Any:
    """Return values of the config, or those at a place in it, as values of a type.

    Raises:
        ConfigError: A key or value is invalid; the message names the key.
    """
    try:
        converted = _adapter(declared).validate_python(values)
    except ValidationError as error:
        path, message = _describe(error, values, _adapter(declared).json_schema())
        raise ConfigError(f"config: {'.'.join([*place, *path])}: {message}") from None
    return _adapter(declared).dump_python(converted, mode="json", exclude_unset=True)


def checked_recipe(stage: str, layers: list[Layer], is_whole: bool = True) -> dict[str, Any]:
    """Return the keys of a recipe, in which each layer overrides those before it.

    The placement is the one of the last layer that has one.

    Args:
        stage: The section of the recipe.
        layers: The defaults, the preset if any, and the recipe.
        is_whole: Whether the settings must fit each other; the settings of a preset need not.

    Raises:
        ConfigError: A key or value is invalid, or settings do not fit each other; the message names
            the place of the key.
    """
    settings: dict[str, Any] = {}
    further: dict[str, Any] = {}
    places: dict[str, str] = {}
    for place, keys in layers:
        own = {key: keys[key] for key in keys if key in FURTHER_KEYS[stage].model_fields}
        further |= checked(own, FURTHER_KEYS[stage], place)
        settings |= {key: keys[key] for key in keys if key not in own}
        places |= dict.fromkeys(keys, place)
    try:
        found = SETTINGS[stage](**settings)
        undeclared = [key for key in DETERMINED if key in settings]
    except ValidationError as error:
        path, message = _describe(error, settings, recipe_schema(stage))
        place = places.get(path[0], layers[-1].place)
        if not any(problem["loc"] for problem in error.errors()):
            # Settings that do not fit each other.
            if not is_whole:
                return settings | further
            place = layers[-1].place
    else:
        if not undeclared:
            return found.model_dump(mode="json", exclude=set(DETERMINED)) | further
        path, message = undeclared, f"unknown key {_hint(undeclared, recipe_schema(stage))}"
        place = places[path[0]]
    raise ConfigError(f"config: {'.'.join([place, *path])}: {message}")


@cache
def _adapter(declared: Any) -> TypeAdapter[Any]:
    return TypeAdapter(declared)


def _describe(error: ValidationError, values: Any, schema: Schema) -> tuple[list[str], str]:
    """Return the path of the most relevant problem, and a message of one line.

    Where a value may have several forms, those count that it resembles most, of which the problem
    is deepest inside of it. An unknown key explains that another one is missing. A message about
    several keys starts with the one that it is about.
    """
    problems = [(_path(each, values), each) for each in error.errors(include_url=False)]
    ranks = [(len(path), each["type"] == "extra_forbidden") for path, each in problems]
    chosen = [problem for problem, rank in zip(problems, ranks, strict=True) if rank == max(ranks)]
    path, first = chosen[0]
    shown = [text if text.isprintable() else repr(text) for text in map(str, path)]
    if first["type"] == "extra_forbidden":
        schema = without_references(schema)
        # All of the same form of the same entry.
        others = [
            f"; {other[-1]!r}: unknown key {_hint(other, schema)}"
            for other, each in chosen[1:]
            if each["type"] == first["type"] and each["loc"][:-1] == first["loc"][:-1]
        ]
        return shown, f"unknown key {_hint(path, schema)}{''.join(others)}"
    if first["type"] == "missing":
        return shown, "this key is required"
    messages = dict.fromkeys(
        each["msg"].removeprefix("Value error, ") for other, each in chosen if other == path
    )
    message = " or ".join(messages)
    if about := re.match(r"(\w+): (.*)", message):
        return [*shown, about[1]], about[2]
    return shown, f"{message}, found {first['input']!r}"


def _path(problem: Mapping[str, Any], value: Any) -> list[Any]:
    """Return the keys and indices that lead to a problem, without the types in its location."""
    path = []
    for part in problem["loc"]:
        is_index = isinstance(value, list) and isinstance(part, int)
        if is_index or (isinstance(value, dict) and part in value):
            value = value[part]
            path.append(part)
    return [*path, problem["loc"][-1]] if problem["type"] == "missing" else path


def _hint(path: list[Any], schema: Schema) -> str:
    """Return the keys that are similar to an unknown one, or the page that lists all."""
    nodes = list(_forms(schema))
    for part in path[:-1]:
        inner = [_below(node, part) for node in nodes]
        nodes = [form for node in inner if node for form in _forms(node)]
    keys = [key for node in nodes for key in node.get("properties", {})]
    if path[-1] in keys:
        return "(entries of another form have it: remove it, or the keys that these do not have)"
    similar = difflib.get_close_matches(str(path[-1]), dict.fromkeys(keys))
    if similar:
        return f"(did you mean {' or '.join(similar)}?)"
    return "(docs/en/config.md has all keys, docs/en/migration.md the keys of other libraries)"


def _forms(schema: Schema) -> Iterator[Schema]:
    """Yield the schemas of the forms that a value may have."""
    forms = schema.get("anyOf") or schema.get("oneOf")
    yield from forms or [schema]


def _below(schema: Schema, part: Any) -> Schema | None:
    """Return the schema of the value of a key or index; None if it has none."""
    if isinstance(part, int):
        return schema.get("items")
    others = schema.get("additionalProperties")
    return schema.get("properties", {}).get(part, others if isinstance(others, dict) else None)


@cache
def recipe_schema(stage: str) -> Schema:
    """Return the JSON Schema of a recipe, without references."""
    properties: Schema = {}
    for declared in (SETTINGS[stage], FURTHER_KEYS[stage]):
        properties |= without_references(_adapter(declared).json_schema())["properties"]
    for key in DETERMINED:
        properties.pop(key, None)
    return {"type": "object", "properties": properties}


@cache
def config_schema() -> Schema:
    """Return the JSON Schema of the config, without references."""
    schema = without_references(_adapter(Sections).json_schema())
    for stage in SETTINGS:
        section = schema["properties"][stage]["properties"]
        section["defaults"] = recipe_schema(stage)
        for key in section.keys() - {"defaults"}:
            section[key] = {"type": "object", "additionalProperties": recipe_schema(stage)}
    return schema


def without_references(schema: Schema) -> Schema:
    """Return a JSON Schema with its definitions in place of references to them."""
    definitions = schema.get("$defs", {})

    def resolved(node: Any) -> Any:
        if isinstance(node, list):
            return [resolved(each) for each in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolved(definitions[node["$ref"].rpartition("/")[2]])
        if "patternProperties" in node:
            (others,) = node["patternProperties"].values()
            return {"type": "object", "additionalProperties": resolved(others)}
        return {key: resolved(inner) for key, inner in node.items() if key != "$defs"}

    found: Schema = resolved(schema)
    return found
