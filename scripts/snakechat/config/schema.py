"""The check of the config by its models, its errors as one line, and its schema."""

import difflib
import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from snakechat.config.sections import (
    DpoRecipe,
    GenerationRecipe,
    RewardRecipe,
    RlhfRecipe,
    SftRecipe,
)
from snakechat.config.settings import Settings
from snakechat.workflow.errors import InputError

RECIPES: dict[str, type[Settings]] = {
    "sft": SftRecipe,
    "reward": RewardRecipe,
    "dpo": DpoRecipe,
    "rlhf": RlhfRecipe,
    "generations": GenerationRecipe,
}


class ConfigError(InputError):
    """A mistake in the config; the message is one line for the user."""


def available(name: str, names: Collection[str]) -> str:
    """Return the names that exist, in parentheses, for an error about one that does not."""
    similar = difflib.get_close_matches(name, names, n=1)
    guess = f"did you mean {similar[0]}? " if similar else ""
    return f"({guess}available: {', '.join(sorted(names)) or 'none'})"


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
        path, message = _describe(error, values)
        raise ConfigError(f"config: {'.'.join([*place, *path])}: {message}") from None
    return _adapter(declared).dump_python(converted, mode="json", exclude_unset=True)


def checked_recipe(stage: str, layers: list[Layer]) -> dict[str, Any]:
    """Return the keys of a recipe, in which each layer overrides those before it.

    Args:
        stage: The section of the recipe.
        layers: The defaults, the preset if any, and the recipe.

    Raises:
        ConfigError: A key or value is invalid, or settings do not fit each other; the message names
            the place of the key.
    """
    settings: dict[str, Any] = {}
    places: dict[str, str] = {}
    for place, keys in layers:
        settings |= keys
        places |= dict.fromkeys(keys, place)
    try:
        recipe = RECIPES[stage].model_validate(settings)
        return recipe.model_dump(mode="json", exclude_unset=True)
    except ValidationError as error:
        path, message = _describe(error, settings)
        place = places.get(path[0], layers[-1].place)
        if all(not each["loc"] and each["type"] == "value_error" for each in error.errors()):
            # Settings that do not fit each other are a mistake of the recipe.
            place = layers[-1].place
    raise ConfigError(f"config: {'.'.join([place, *path])}: {message}")


@cache
def _adapter(declared: Any) -> TypeAdapter[Any]:
    return TypeAdapter(declared)


def _describe(error: ValidationError, values: Any) -> tuple[list[str], str]:
    """Return the path of the most relevant problem, and a message of one line.

    Where a value may have several forms, those count that it resembles most: the problem is deepest
    inside of it, and the fewest keys are unknown. A message about several keys starts with the one
    that it is about.
    """
    problems = [(_path(each, values), each) for each in error.errors(include_url=False)]
    ranks = [
        (len(path), each["type"] == "unknown_key", -each.get("ctx", {}).get("number", 0))
        for path, each in problems
    ]
    path, first = problems[ranks.index(max(ranks))]
    shown = [text if text.isprintable() else repr(text) for text in map(str, path)]
    if first["type"] == "unknown_key":
        return shown, first["msg"]
    if first["type"] == "missing":
        return shown, "this key is required"
    messages = [
        each["msg"].removeprefix("Value error, ")
        for (other, each), rank in zip(problems, ranks, strict=True)
        if other == path and rank == max(ranks)
    ]
    message = " or ".join(dict.fromkeys(messages))
    if about := re.match(r"(\w+): (.*)", message):
        return [*shown, about[1]], about[2]
    # Users may have written a key of an API there.
    is_secret = path[-1:] in (["url"], ["key_env"])
    return shown, message if is_secret else f"{message}, found {first['input']!r}"


def _path(problem: Mapping[str, Any], value: Any) -> list[Any]:
    """Return the keys and indices that lead to a problem, without the types in its location."""
    path = []
    for part in problem["loc"]:
        # An item that is missing has an index, too.
        is_index = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_index or (isinstance(value, dict) and part in value):
            value = value[part]
            path.append(part)
    if problem["type"] == "unknown_key":
        return [*path, problem["ctx"]["key"]]
    # The index of a missing item, such as of a pair, is not a key that a user writes.
    is_key = problem["type"] == "missing" and isinstance(problem["loc"][-1], str)
    return [*path, problem["loc"][-1]] if is_key else path
