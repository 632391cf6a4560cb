"""The JSON Schema of the config, derived from the declared types, and the check against it."""

import dataclasses
import re
import types
from collections.abc import Iterator
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import jsonschema

from snakechat.config.dpo import DpoSettings
from snakechat.config.errors import ConfigError
from snakechat.config.generations import GenerationSettings
from snakechat.config.placement_schema import OtherPlacement, RlhfPlacement
from snakechat.config.plain_values import shown_key
from snakechat.config.reward import RewardSettings
from snakechat.config.rlhf import RlhfSettings
from snakechat.config.schema_errors import describe
from snakechat.config.sections import RlhfKeys, Sections, TrainingKeys
from snakechat.config.sft import SftSettings
from snakechat.workflow.value_types import Keyword, Name, Without, Written

Schema = dict[str, Any]

SETTINGS = {
    "sft": SftSettings,
    "reward": RewardSettings,
    "dpo": DpoSettings,
    "rlhf": RlhfSettings,
    "generations": GenerationSettings,
}
TYPE_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean"}


def schema_of(declared: Any) -> Schema:
    """Return the JSON Schema of a type: scalars, containers, dataclasses and typed dicts."""
    origin, arguments = get_origin(declared), get_args(declared)
    if declared is Any:
        return {}
    if declared in TYPE_NAMES:
        return {"type": TYPE_NAMES[declared]}
    if origin is Annotated:
        return _annotated(arguments[0], declared.__metadata__)
    if origin is NotRequired:
        return schema_of(arguments[0])
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is list:
        return {"type": "array", "items": schema_of(arguments[0])}
    if origin is tuple:
        size = len(arguments)
        items = schema_of(arguments[0])
        return {"type": "array", "minItems": size, "maxItems": size, "items": items}
    if origin is dict:
        names = {} if arguments[0] is str else {"propertyNames": schema_of(arguments[0])}
        return {"type": "object", **names, "additionalProperties": schema_of(arguments[1])}
    return _record(declared)


def _annotated(declared: Any, metadata: tuple[Any, ...]) -> Schema:
    schema = schema_of(declared)
    for item in metadata:
        if isinstance(item, Written):
            schema = schema_of(item.type)
        elif isinstance(item, Keyword):
            schema[item.name] = item.value
        elif isinstance(item, Without):
            for key in item.keys:
                del schema["properties"][key]
    return schema


def _union(members: tuple[Any, ...]) -> Schema:
    """Return the schema of a union; null and plain scalars become a list of types."""
    schemas = [schema_of(member) for member in members if member is not types.NoneType]
    if all(schema.keys() == {"type"} for schema in schemas):
        union: Schema = {"type": [schema["type"] for schema in schemas]}
    else:
        union = schemas[0] if len(schemas) == 1 else {"oneOf": schemas}
    if types.NoneType in members:
        if "enum" in union:
            union["enum"].append(None)
        elif "oneOf" in union:
            union["oneOf"].append({"type": "null"})
        else:
            given = union["type"]
            union["type"] = [*(given if isinstance(given, list) else [given]), "null"]
    return union


def _record(declared: Any) -> Schema:
    """Return the schema of a dataclass or a typed dict: these keys and no others."""
    hints = get_type_hints(declared, include_extras=True)
    if is_typeddict(declared):
        required = [name for name in hints if name in declared.__required_keys__]
    else:
        fields = dataclasses.fields(declared)
        required = [field.name for field in fields if field.default is dataclasses.MISSING]
        # `X | None = None` is a key that may be absent; null is not a value of it.
        for field in fields:
            if field.default is None:
                members = [a for a in get_args(hints[field.name]) if a is not types.NoneType]
                hints[field.name] = members[0]
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required,
        "properties": {name: schema_of(hint) for name, hint in hints.items()},
    }


@cache
def placement_schema(stage: str) -> Schema:
    """Return the schema of a complete placement of a stage."""
    return schema_of(RlhfPlacement if stage == "rlhf" else OtherPlacement)


def _placement_changes(stage: str) -> Schema:
    """Return the schema of a recipe's `placement`: a deployment's name, or keys that change one."""
    keys = placement_schema(stage)["properties"]
    return {
        "type": ["string", "object"],
        "additionalProperties": False,
        "properties": {**keys, "deployment": {"type": "string"}},
    }


def recipe_schema(stage: str) -> Schema:
    """Return the schema of a recipe, all of whose keys are optional."""
    properties: Schema = _record(SETTINGS[stage])["properties"]
    # The models and judges of a recipe determine them.
    for key in ("template", "reward_templates", "llm_judges"):
        properties.pop(key, None)
    if stage == "rlhf":
        properties |= _record(RlhfKeys)["properties"]
    if stage != "generations":
        properties |= _record(TrainingKeys)["properties"]
    properties["placement"] = _placement_changes(stage)
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _stage_schema(stage: str) -> Schema:
    recipe = recipe_schema(stage)
    keys = recipe["properties"]
    # The seed of a recipe defaults to the one of the top level.
    defaults = {**recipe, "required": [key for key in keys if key != "seed"]}
    names = schema_of(Name)
    properties = {
        "defaults": defaults,
        "recipes": {"type": "object", "propertyNames": names, "additionalProperties": recipe},
    }
    if "preset" in keys:
        # A preset cannot be based on another one.
        without = {**recipe, "properties": {key: keys[key] for key in keys if key != "preset"}}
        properties["presets"] = {
            "type": "object",
            "propertyNames": names,
            "additionalProperties": without,
        }
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(properties),
        "properties": properties,
    }


@cache
def config_schema() -> Schema:
    """Return the schema of the whole config."""
    schema = schema_of(Sections)
    for stage in SETTINGS:
        schema["properties"][stage] = _stage_schema(stage)
        schema["required"].append(stage)
    return schema


@cache
def _validator_class() -> Any:
    # Programs count with integers: 2.0 is not one.
    checker = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: type(value) is int
    )
    return jsonschema.validators.extend(
        jsonschema.Draft202012Validator, {"pattern": _pattern}, type_checker=checker
    )


def _pattern(_: Any, pattern: str, text: Any, __: Schema) -> Iterator[jsonschema.ValidationError]:
    """Check the keyword `pattern`: in JSON Schema, $ does not match before a last line break."""
    if isinstance(text, str) and not re.search(pattern.replace("$", r"\Z"), text):
        yield jsonschema.ValidationError(f"{text!r} does not match {pattern!r}")


def check_schema(values: Any, schema: Schema, *place: str) -> None:
    """Check values of the config, or those at a place in it, against a schema.

    An integer becomes a float in place where the schema has a number.

    Raises:
        ConfigError: A key or value is invalid; the message names the key.
    """
    validator = _validator_class()(schema, format_checker=jsonschema.FormatChecker(["regex"]))
    found = describe(validator.iter_errors(values))
    if found:
        path, message = found
        key = ".".join(map(shown_key, [*place, *path])) or "top level"
        raise ConfigError(f"config: {key}: {message}")
    _with_floats(values, schema)


def _with_floats(value: Any, schema: Schema) -> Any:
    """Return a valid value with floats where the schema has numbers: 1 is 1.0 for each program.

    Keys of any type keep what the user wrote. So do the values of a sweep, of which recipes decide.
    """
    for choice in schema.get("oneOf", ()):
        value = _with_floats(value, choice)
    if type(value) is int and schema.get("type") in ("number", ["number", "null"]):
        return float(value)
    if isinstance(value, dict):
        others = schema.get("additionalProperties")
        for key, item in value.items():
            inner = schema.get("properties", {}).get(key, others)
            value[key] = _with_floats(item, inner) if isinstance(inner, dict) else item
    elif isinstance(value, list) and "items" in schema:
        value[:] = [_with_floats(item, schema["items"]) for item in value]
    return value
