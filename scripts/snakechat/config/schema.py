"""The types of the whole config, the check by pydantic, and its errors as one line."""

import difflib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, NotRequired, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from snakechat.config.dpo import DpoSettings
from snakechat.config.errors import ConfigError
from snakechat.config.generations import GenerationSettings
from snakechat.config.reward import RewardSettings
from snakechat.config.rlhf import RlhfSettings
from snakechat.config.sections import RlhfKeys, Sections, TrainingKeys
from snakechat.config.sft import SftSettings
from snakechat.workflow.placement import Placement
from snakechat.workflow.value_types import Name

# Python's regular expressions look ahead and back.
OPTIONS = ConfigDict(extra="forbid", allow_inf_nan=False, regex_engine="python-re")

SETTINGS = {
    "sft": SftSettings,
    "reward": RewardSettings,
    "dpo": DpoSettings,
    "rlhf": RlhfSettings,
    "generations": GenerationSettings,
}
# Fields of settings that the models and judges of a recipe determine.
DETERMINED = ("template", "reward_templates", "llm_judges")
# A deployment has values for these, which have no defaults.
REQUIRED = [key for key in get_type_hints(Placement) if key not in vars(Placement)]

Schema = dict[str, Any]


def _record(name: str, keys: Mapping[str, Any], required: Collection[str] = ()) -> Any:
    """Return the type of a mapping with these keys and no others."""
    types = {key: each if key in required else NotRequired[each] for key, each in keys.items()}
    record = TypedDict(name, types)  # type: ignore[misc]
    # Typed dicts inside of it have the same options.
    return with_config(OPTIONS)(record)


def _keys_of(declared: type) -> dict[str, Any]:
    """Return the type of each key of a dataclass or a typed dict."""
    return get_type_hints(declared, include_extras=True)


def recipe_keys(stage: str) -> dict[str, Any]:
    """Return the type of each key of a recipe, all of which are optional."""
    settings = _keys_of(SETTINGS[stage])
    keys = {key: each for key, each in settings.items() if key not in DETERMINED}
    if stage == "rlhf":
        keys |= _keys_of(RlhfKeys)
    if stage != "generations":
        keys |= _keys_of(TrainingKeys)
    # The name of a deployment, or keys that change one.
    keys["placement"] = str | _record("Changes", {**_keys_of(Placement), "deployment": str})
    return keys


def _stage(stage: str) -> Any:
    """Return the type of the section of a stage."""
    keys = recipe_keys(stage)
    # The seed of a recipe defaults to the one of the top level.
    sections = {"defaults": _record("Defaults", keys, keys.keys() - {"seed"})}
    sections["recipes"] = dict[Name, _record("Recipe", keys)]  # type: ignore[misc]
    if "preset" in keys:
        # A preset cannot be based on another one.
        preset = _record("Preset", {key: keys[key] for key in keys if key != "preset"})
        sections["presets"] = dict[Name, preset]  # type: ignore[valid-type]
    return _record("Stage", sections, sections)


@cache
def config_type() -> Any:
    """Return the type of the whole config."""
    sections = _keys_of(Sections)
    deployment = _record("Deployment", _keys_of(Placement), REQUIRED)
    sections["deployments"] = dict[Name, deployment]  # type: ignore[valid-type]
    sections |= {stage: _stage(stage) for stage in SETTINGS}
    return _record("Config", sections, sections)


@cache
def recipe_type(stage: str) -> Any:
    """Return the type of a recipe."""
    return _record("Recipe", recipe_keys(stage))


def checked(values: Any, declared: Any, *place: str) -> Any:
    """Return values of the config, or those at a place in it, as values of a type.

    Numbers are converted to the declared type: where a float is expected, 1 becomes 1.0. The text
    1e-5 also becomes a float, because YAML does not parse it as a number.

    Raises:
        ConfigError: A key or value is invalid; the message names the key.
    """
    try:
        converted = _adapter(declared).validate_python(values)
    except ValidationError as error:
        path, message = _describe(error, values, declared)
        raise ConfigError(f"config: {'.'.join([*place, *path])}: {message}") from None
    _check_booleans(values, converted, *place)
    return converted


def _check_booleans(value: Any, converted: Any, *place: str) -> None:
    """Raise ConfigError for true or false where a number is expected: pydantic reads 1 or 0."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_booleans(inner, converted[key], *place, key)
    elif isinstance(value, list):
        for number, (inner, of_inner) in enumerate(zip(value, converted, strict=True)):
            _check_booleans(inner, of_inner, *place, str(number))
    elif isinstance(value, bool) and not isinstance(converted, bool):
        raise ConfigError(f"config: {'.'.join(place)}: expected a number, found {value}")


@cache
def _adapter(declared: Any) -> TypeAdapter[Any]:
    return TypeAdapter(declared, config=None if hasattr(declared, "__total__") else OPTIONS)


def _describe(error: ValidationError, values: Any, declared: Any) -> tuple[list[str], str]:
    """Return the path of the most relevant problem, and a message of one line.

    Where a value may have several forms, those count that it resembles most, of which the problem
    is deepest inside of it. An unknown key explains that another one is missing.
    """
    problems = [(_path(each, values), each) for each in error.errors(include_url=False)]
    ranks = [(len(path), each["type"] == "extra_forbidden") for path, each in problems]
    chosen = [problem for problem, rank in zip(problems, ranks, strict=True) if rank == max(ranks)]
    path, first = chosen[0]
    shown = [text if text.isprintable() else repr(text) for text in map(str, path)]
    if first["type"] == "extra_forbidden":
        return shown, f"unknown key {_hint(path, declared)}"
    if first["type"] == "missing":
        return shown, "this key is required"
    messages = dict.fromkeys(
        each["msg"].removeprefix("Value error, ") for other, each in chosen if other == path
    )
    return shown, f"{' or '.join(messages)}, found {first['input']!r}"


def _path(problem: Mapping[str, Any], value: Any) -> list[Any]:
    """Return the keys and indices that lead to a problem, without the types in its location."""
    path = []
    for part in problem["loc"]:
        is_index = isinstance(value, list) and isinstance(part, int)
        if is_index or (isinstance(value, dict) and part in value):
            value = value[part]
            path.append(part)
    return [*path, problem["loc"][-1]] if problem["type"] == "missing" else path


def _hint(path: list[Any], declared: Any) -> str:
    """Return the keys that are similar to an unknown one, or the page that lists all."""
    nodes = list(_forms(json_schema(declared)))
    for part in path[:-1]:
        inner = [_below(node, part) for node in nodes]
        nodes = [form for node in inner if node for form in _forms(node)]
    keys = [key for node in nodes for key in node.get("properties", {})]
    if path[-1] in keys:
        return "(entries of another form have it: remove it, or the keys that these do not have)"
    similar = difflib.get_close_matches(str(path[-1]), dict.fromkeys(keys))
    if similar:
        return f"(did you mean {' or '.join(similar)}?)"
    return "(docs/en/config.md has all keys, docs/en/migration.md those of other libraries)"


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


def json_schema(declared: Any) -> Schema:
    """Return the JSON Schema of a type, without references."""
    schema = _adapter(declared).json_schema()
    definitions = schema.pop("$defs", {})

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
        return {key: resolved(inner) for key, inner in node.items()}

    return resolved(schema)
