"""Types of values in the config, with their constraints.

The constraints are keywords of JSON Schema: `snakechat.config.schema` derives the schema of
config.yaml from them. Standard library only: the workflow imports this module while it plans.
"""

from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Annotated, Any


@dataclass(frozen=True)
class Keyword:
    """A keyword of JSON Schema that constrains an annotated type: Keyword("minimum", 1)."""

    name: str
    value: Any = field(hash=False)


@dataclass(frozen=True)
class Written:
    """The type that a key has in config.yaml, where a program receives another one."""

    type: Any


@dataclass(frozen=True)
class Without:
    """Keys of a record that an annotated type does not have."""

    keys: tuple[str, ...]


Count = Annotated[int, Keyword("minimum", 1)]
NonNegativeInt = Annotated[int, Keyword("minimum", 0)]
Positive = Annotated[float, Keyword("exclusiveMinimum", 0)]
NonNegative = Annotated[float, Keyword("minimum", 0)]
Fraction = Annotated[float, Keyword("minimum", 0), Keyword("maximum", 1)]
DecayRate = Annotated[float, Keyword("minimum", 0), Keyword("exclusiveMaximum", 1)]
SequenceLength = Annotated[int, Keyword("minimum", 2)]
Seed = Annotated[int, Keyword("minimum", 0), Keyword("maximum", 2**32 - 1)]

# No slash, no space and no leading dot: a name is a path below output/ that needs no quoting.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$(?<![.]json)"
Name = Annotated[str, Keyword("pattern", NAME_PATTERN)]

EnvironmentVariable = Annotated[str, Keyword("pattern", "^[A-Za-z_][A-Za-z0-9_]*$")]


def changed_values(record: Any) -> dict[str, Any]:
    """Return the values of a dataclass that differ from their defaults, as JSON values."""
    defaults = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(record)
    }
    return {key: value for key, value in asdict(record).items() if value != defaults[key]}
