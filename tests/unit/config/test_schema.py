"""The JSON Schema that is derived from the declared types."""

from dataclasses import dataclass
from typing import Annotated, Literal, NotRequired, TypedDict

import pytest

from snakechat.config.errors import ConfigError
from snakechat.config.rlhf import WeightedFunction
from snakechat.config.schema import SETTINGS, check_schema, config_schema, recipe_schema, schema_of
from snakechat.config.sections import Glob
from snakechat.workflow.digests import canonical_json
from snakechat.workflow.value_types import Keyword, Name, Positive
from support.configs import config_values


@dataclass(frozen=True)
class Base:
    required: int


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    choice: Literal["a", "b"]
    optional: Literal[0, 1] | None = None


class Record(TypedDict):
    name: Name
    note: NotRequired[str]


TYPES = [
    (Literal["a"] | None, {"enum": ["a", None]}),
    (Positive | None, {"type": ["number", "null"], "exclusiveMinimum": 0}),
    (
        str | dict[str, int],
        {
            "oneOf": [
                {"type": "string"},
                {"type": "object", "additionalProperties": {"type": "integer"}},
            ]
        },
    ),
    (
        Derived,
        {
            "type": "object",
            "additionalProperties": False,
            "required": ["required", "choice"],
            "properties": {
                "required": {"type": "integer"},
                "choice": {"enum": ["a", "b"]},
                "optional": {"enum": [0, 1]},
            },
        },
    ),
    (
        Record,
        {
            "type": "object",
            "additionalProperties": False,
            "required": ["name"],
            "properties": {"name": schema_of(Name), "note": {"type": "string"}},
        },
    ),
]


@pytest.mark.parametrize(("declared", "schema"), TYPES, ids=[str(pair[0]) for pair in TYPES])
def test_schema_of_a_type(declared, schema):
    assert schema_of(declared) == schema


@pytest.mark.parametrize(
    ("declared", "value", "message"),
    [
        (int, 2.0, "config: a.b: 2.0 is not of type 'integer'"),
        (float, "1e-5", "config: a.b: '1e-5' is not of type 'number' (YAML reads 1e-5 as text"),
        (list[str], "x", "config: a.b: 'x' is not of type 'array' (expected a list: [x])"),
        (
            dict[str, int],
            "x",
            "config: a.b: 'x' is not of type 'object' (expected keys with values: {KEY: VALUE})",
        ),
        (list[int], [1, "x"], "config: a.b.1: 'x' is not of type 'integer'"),
        (
            dict[Name, int],
            {1.3: 1},
            "config: a.b: 1.3 is not of type 'string' (YAML reads it as a number or a boolean",
        ),
        (Derived, {"required": 1}, "config: a.b: 'choice' is a required property"),
    ],
)
def test_invalid_value_is_reported_with_its_key(declared, value, message):
    with pytest.raises(ConfigError) as error:
        check_schema(value, schema_of(declared), "a", "b")
    assert str(error.value).startswith(message)


class Cat(TypedDict):
    claws: int
    name: str


class Fish(TypedDict):
    fins: int
    name: str


Pet = Annotated[Cat, Keyword("title", "a cat")] | Annotated[Fish, Keyword("title", "a fish")] | str


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"claws": 4}, "a: 'name' is a required property (in a cat)"),
        ({"fins": "1e1", "name": "x"}, "a.fins: '1e1' is not of type 'integer' (YAML reads 1e1"),
        (
            {"nam": "x"},
            "a: {'nam': 'x'} is not valid: expected one of: a cat; a fish; string (did you mean"
            " name?)",
        ),
    ],
)
def test_error_of_the_alternative_that_was_meant(value, message):
    with pytest.raises(ConfigError) as error:
        check_schema(value, schema_of(Pet), "a")
    assert str(error.value).startswith(f"config: {message}")


@pytest.mark.parametrize(
    ("declared", "value", "expected"),
    [
        (dict[str, float], {"a": 1, "b": 0.5}, {"a": 1.0, "b": 0.5}),
        (dict[str, Positive | None], {"a": 2, "b": None}, {"a": 2.0, "b": None}),
        (dict[str, tuple[float, float]], {"a": [0, 1]}, {"a": [0.0, 1.0]}),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (
            dict[str, float | WeightedFunction],
            {"a": 1, "b": {"weight": 2, "arguments": {"least": 3}}},
            {"a": 1.0, "b": {"weight": 2.0, "arguments": {"least": 3}}},
        ),
    ],
)
def test_an_integer_becomes_a_float_where_the_schema_has_a_number(declared, value, expected):
    check_schema(value, schema_of(declared))
    assert canonical_json(value) == canonical_json(expected)


def test_config_is_valid():
    check_schema(config_values(), config_schema())


@pytest.mark.parametrize("stage", SETTINGS)
def test_each_setting_has_a_default(stage):
    # That of the seed is at the top level.
    defaults = config_values()[stage]["defaults"].keys() | {"seed"}
    assert defaults == recipe_schema(stage)["properties"].keys()


@pytest.mark.parametrize("glob", ["data/*.txt", "/data/*.csv", "../*.csv", "data/../../*.csv"])
def test_invalid_glob(glob):
    with pytest.raises(ConfigError):
        check_schema(glob, schema_of(Glob))
