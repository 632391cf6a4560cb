"""What recipes name: recipes and models as SECTION/NAME, LLM judges, and reward functions."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, GetPydanticSchema
from pydantic.json_schema import SkipJsonSchema

from snakechat.config.settings import Name, Number, RefersTo, Settings
from snakechat.workflow.errors import InputError

# A reference, or the weights of several; in a spec, whose keys are sorted, ordered pairs.
RewardReferences = str | Mapping[str, float] | Sequence[tuple[str, float]] | None

# The section of LLM judges: models behind an endpoint, which rate or compare responses.
JUDGES = "llm_judges"
# What every reward function receives by keyword besides the columns that datasets keep.
MESSAGES = "messages"
# Names of the first two parameters of every reward function, which no column can have.
POSITIONAL = ("prompts", "responses")


class Reference(NamedTuple):
    """A recipe of a stage, or an entry of `models` or `llm_judges`."""

    section: str
    name: str


def weighted_references(value: RewardReferences) -> dict[str, float]:
    """Return the weight of each reference of `reward` or `judge`."""
    if value is None:
        return {}
    return {value: 1.0} if isinstance(value, str) else dict(value)


def input_names(key: str, value: RewardReferences) -> dict[str, str]:
    """Return the job input of each model of `reward` or `judge` (key), by reference.

    The input of a single model has the name of the key; of several models, KEY.NUMBER from 1: names
    of models do not count. An LLM judge has no input.
    """
    names = enumerate(model_names(value), start=1)
    return {name: key if isinstance(value, str) else f"{key}.{number}" for number, name in names}


def _is_judge(text: str) -> bool:
    return text.startswith(f"{JUDGES}/")


def model_names(value: RewardReferences) -> list[str]:
    """Return what `reward` or `judge` has apart from LLM judges: references or input names."""
    return [name for name in weighted_references(value) if not _is_judge(name)]


def judge_names(*values: RewardReferences) -> list[str]:
    """Return the names of the LLM judges among values of `reward` or `judge`."""
    texts = [text for value in values for text in weighted_references(value) if _is_judge(text)]
    return [text.removeprefix(f"{JUDGES}/") for text in dict.fromkeys(texts)]


def in_order(value: RewardReferences) -> RewardReferences:
    """Return weighted references as ordered pairs; one of weight 1 as its name.

    LLM judges come last, by name: another order of them is the same sum.
    """
    weights = weighted_references(value)
    pairs = sorted(weights.items(), key=lambda pair: pair[0] if _is_judge(pair[0]) else "")
    if isinstance(value, str | None) or [*weights.values()] == [1]:
        return next(iter(weights), None)
    return pairs


# A value of `reward` or `judge`.
Reward = Annotated[
    str | list[tuple[str, float]] | None,
    GetPydanticSchema(
        lambda _, handler: handler(
            Annotated[
                str
                | Annotated[dict[str, Number], Field(min_length=1)]
                | SkipJsonSchema[list[tuple[str, Number]]]
                | None,
                AfterValidator(in_order),
            ]
        )
    ),
    RefersTo(("reward", "models", JUDGES)),
]


class WeightedFunction(Settings):
    """A reward function with arguments, which it receives by keyword."""

    weight: Number
    arguments: dict[str, Any] = Field({})


def _without_empty_arguments(
    functions: dict[str, float | WeightedFunction],
) -> dict[str, float | WeightedFunction]:
    """Return a function without arguments as its weight alone."""
    return {
        name: entry if isinstance(entry, float) or entry.arguments else entry.weight
        for name, entry in functions.items()
    }


# The weight of each function, rewards/NAME.py.
RewardFunctions = Annotated[
    dict[Name, Number | WeightedFunction], AfterValidator(_without_empty_arguments)
]


def weighted_functions(setting: Mapping[str, Any]) -> dict[str, tuple[float, dict[str, Any]]]:
    """Return {NAME: (weight, arguments)} of the key `reward_functions`."""
    functions = {
        name: WeightedFunction.model_validate(
            {"weight": entry} if isinstance(entry, int | float) else entry
        )
        for name, entry in setting.items()
    }
    return {name: (entry.weight, entry.arguments) for name, entry in functions.items()}


def api_key(name: str, key_env: str | None) -> str | None:
    """Return the API key of a judge; None if it needs none.

    Raises:
        InputError: The environment variable is not set, or is not an API key.
    """
    if key_env is None:
        return None
    key = os.environ.get(key_env, "").strip()
    # Error messages of the client quote a header with other characters.
    if not re.fullmatch("[!-~]+", key):
        raise InputError(
            f"{JUDGES}.{name}.key_env: environment variable {key_env} has no key: export it before"
            " the build"
        )
    return key
