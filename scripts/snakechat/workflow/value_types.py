"""Types of values in the config, with their constraints.

`snakechat.config.schema` has pydantic check them. Standard library only: each program imports this
module.
"""

from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Annotated, Any


@dataclass(frozen=True)
class Keyword:
    """A constraint of an annotated type, by the name that pydantic-core has: Keyword("ge", 1)."""

    name: str
    value: Any = field(hash=False)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        """Return the schema of the type (source) with this constraint."""
        return {**handler(source), self.name: self.value}


@dataclass(frozen=True)
class Written:
    """The type that a key has in config.yaml, where a program receives another one."""

    type: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        """Return the schema of the type in config.yaml."""
        schema: dict[str, Any] = handler.generate_schema(self.type)
        return schema


Count = Annotated[int, Keyword("ge", 1)]
NonNegativeInt = Annotated[int, Keyword("ge", 0)]
Positive = Annotated[float, Keyword("gt", 0)]
NonNegative = Annotated[float, Keyword("ge", 0)]
Fraction = Annotated[float, Keyword("ge", 0), Keyword("le", 1)]
DecayRate = Annotated[float, Keyword("ge", 0), Keyword("lt", 1)]
SequenceLength = Annotated[int, Keyword("ge", 2)]
Seed = Annotated[int, Keyword("ge", 0), Keyword("le", 2**32 - 1)]

# The suffixes of files beside results and logs: their names must not be those of other results.
NAME_END = r"(?<![.]json)(?<![.]html)(?<![.]log)"
# No slash, no space and no leading dot: a name is a path below output/ that needs no quoting. File
# systems allow 255 bytes, of which suffixes need some.
Name = Annotated[str, Keyword("pattern", rf"^[A-Za-z0-9][A-Za-z0-9_.-]{{0,199}}{NAME_END}\Z")]

EnvironmentVariable = Annotated[str, Keyword("pattern", r"^[A-Za-z_][A-Za-z0-9_]*\Z")]


def changed_values(record: Any) -> dict[str, Any]:
    """Return the values of a dataclass that differ from their defaults, as JSON values."""
    defaults = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(record)
    }
    return {key: value for key, value in asdict(record).items() if value != defaults[key]}
