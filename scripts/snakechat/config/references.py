"""References to models and judges: SECTION/NAME, such as sft/NAME, models/NAME or llm_judges/NAME.

Standard library only: the workflow and the programs import this module.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

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


def single_reference(value: RewardReferences) -> RewardReferences:
    """Return the value of `reward` or `judge` with one reference of weight 1 as its name."""
    weights = weighted_references(value)
    return next(iter(weights)) if list(weights.values()) == [1] else value


def ordered_references(value: RewardReferences) -> RewardReferences:
    """Return the value of `reward` or `judge` as a spec has it: a mapping as ordered pairs."""
    return list(value.items()) if isinstance(value, Mapping) else value


def input_names(key: str, value: RewardReferences) -> dict[str, str]:
    """Return the reference of each job input with a model of `reward` or `judge`.

    The input of a single model has the name of the key, those of several are KEY.REFERENCE. LLM
    judges are no inputs.
    """
    names = [name for name in weighted_references(value) if parse_reference(name).section != JUDGES]
    if isinstance(value, str):
        return {key: value} if names else {}
    return {f"{key}.{name}": name for name in names}
