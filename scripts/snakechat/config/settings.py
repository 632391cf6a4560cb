"""Settings as pydantic models: their base, and the types of values with their constraints."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

# The default of a key that a user may omit, and that a spec omits where nothing reads it.
ABSENT: Any = None


class Settings(BaseModel):
    """Keys and the types of their values; another key is an error.

    Numbers are converted: where a float is expected, 1 becomes 1.0. The text 1e-5 also becomes a
    float, because YAML does not parse it as a number.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        # Python's regular expressions look ahead and back.
        regex_engine="python-re",
        protected_namespaces=(),
    )


def _check_number(value: Any) -> Any:
    """Reject true and false, which pydantic reads as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


IS_NUMBER = BeforeValidator(_check_number)

Number = Annotated[float, IS_NUMBER]
Count = Annotated[int, Field(ge=1), IS_NUMBER]
NonNegativeInt = Annotated[int, Field(ge=0), IS_NUMBER]
SequenceLength = Annotated[int, Field(ge=2), IS_NUMBER]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1), IS_NUMBER]
Positive = Annotated[float, Field(gt=0), IS_NUMBER]
NonNegative = Annotated[float, Field(ge=0), IS_NUMBER]
Fraction = Annotated[float, Field(ge=0, le=1), IS_NUMBER]
DecayRate = Annotated[float, Field(ge=0, lt=1), IS_NUMBER]

# The suffixes of files beside results and logs: no result may have such a name.
NAME_END = r"(?<![.]json)(?<![.]html)(?<![.]log)"
# No slash, no space and no leading dot: a name is a path below output/ that needs no quoting. File
# systems allow 255 bytes, of which suffixes need some.
Name = Annotated[
    str, StringConstraints(pattern=rf"^[A-Za-z0-9][A-Za-z0-9_.-]{{0,199}}{NAME_END}\Z")
]
