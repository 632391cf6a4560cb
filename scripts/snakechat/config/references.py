"""References to models and judges: SECTION/NAME, such as sft/NAME or llm_judges/NAME."""

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field, GetPydanticSchema
from pydantic.json_schema import SkipJsonSchema

from snakechat.config.settings import Number

# A reference; the weights of several, as a mapping in the config and as ordered pairs in a spec,
# whose keys are sorted; or None.
RewardReferences = str | Mapping[str, float] | Sequence[tuple[str, float]] | None


# The section of LLM judges.
JUDGES = "llm_judges"


class Reference(NamedTuple):
    """A recipe of a stage, or an entry of `models` or `llm_judges`."""

    section: str
    name: str


def parse_reference(text: str) -> Reference:
    """Return the section and the name of a reference; a plain NAME is one of `models`.

    The name of a recipe has no slash.
    """
    section, slash, name = text.partition("/")
    return Reference(section, name) if slash else Reference("models", text)


def weighted_references(value: RewardReferences) -> dict[str, float]:
    """Return the weight of each reference of `reward` or `judge`."""
    if value is None:
        return {}
    return {value: 1.0} if isinstance(value, str) else dict(value)


def input_names(key: str, value: RewardReferences) -> dict[str, str]:
    """Return the reference of each job input with a model of `reward` or `judge`.

    The input of a single model has the name of the key; of several models, KEY.REFERENCE. An LLM
    judge has no input.
    """
    names = [name for name in weighted_references(value) if parse_reference(name).section != JUDGES]
    if isinstance(value, str):
        return {key: value} if names else {}
    return {f"{key}.{name}": name for name in names}


def _in_order(value: RewardReferences) -> RewardReferences:
    """Return weighted references as ordered pairs; one of weight 1 as its name."""
    pairs = list(weighted_references(value).items())
    if isinstance(value, str | None) or [weight for _, weight in pairs] == [1]:
        return pairs[0][0] if pairs else None
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
                AfterValidator(_in_order),
            ]
        )
    ),
]
