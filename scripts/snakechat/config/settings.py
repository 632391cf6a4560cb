"""Settings as pydantic models: their base, the types of values, and the settings of SFT, reward
models and DPO.
"""

import difflib
import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

# The default of a key that a user may omit, and that a spec omits where nothing reads it.
ABSENT: Any = None
ALL_KEYS = "docs/en/config.md has all keys, docs/en/migration.md the keys of other libraries"


class ReadIf(NamedTuple):
    """Whether a setting has an effect, given all settings, in the annotation of its field.

    otherwise: When it has none, for the error.
    """

    is_read: Callable[[Mapping[str, Any]], bool]
    otherwise: str


def only_with(key: str, *values: str) -> ReadIf:
    """Return the condition that another setting has one of some values, or any but null and 0."""
    if not values:
        return ReadIf(lambda settings: bool(settings.get(key)), f"without {key}")
    otherwise = f"without {key}: {' or '.join(values)}"
    return ReadIf(lambda settings: settings.get(key) in values, otherwise)


class RefersTo(NamedTuple):
    """The sections whose entries a setting may name as SECTION/NAME.

    plain: The section whose entries it names by NAME alone.
    """

    sections: tuple[str, ...]
    plain: str | None = None


class Settings(BaseModel):
    """Keys and the types of their values; another key is an error.

    Numbers are converted: where a float is expected, 1 becomes 1.0. The text 1e-5 also becomes a
    float, because YAML does not parse it as a number.

    Attributes:
        not_keys: Fields that are not keys of the config.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        # Python's regular expressions look ahead and back.
        regex_engine="python-re",
        protected_namespaces=(),
    )
    not_keys: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, values: Any) -> Any:
        """Report all unknown keys at once, with similar ones."""
        known = [key for key in cls.model_fields if key not in cls.not_keys]
        unknown = [key for key in values if key not in known] if isinstance(values, dict) else []
        if unknown and cls.model_config["extra"] != "allow":
            similar = {key: difflib.get_close_matches(str(key), known) for key in unknown}
            hints = {
                key: f"did you mean {' or '.join(keys)}?" if keys else ALL_KEYS
                for key, keys in similar.items()
            }
            texts = [f"{key!r}: unknown key ({hint})" for key, hint in hints.items()]
            # Its path has the first one.
            message = "; ".join(texts).removeprefix(f"{unknown[0]!r}: ")
            context = {"key": unknown[0], "number": len(unknown), "message": message}
            raise PydanticCustomError("unknown_key", "{message}", context)
        return values

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if found := [problem for problem, is_wrong in self.problems().items() if is_wrong]:
            raise ValueError(found[0])
        return self

    def problems(self) -> dict[str, bool]:
        """Return whether values do not fit each other, by `key: what is wrong`, or without key."""
        return {}

    @classmethod
    @cache
    def notes(cls, kind: type) -> list[tuple[str, Any]]:
        """Return (key, note) of each ReadIf or RefersTo in the annotations of fields."""
        return [
            (key, note)
            for key, of in cls.model_fields.items()
            for note in of.metadata
            if isinstance(note, kind)
        ]

    @classmethod
    def without_effect(cls, settings: Mapping[str, Any]) -> dict[str, str]:
        """Return the keys that nothing reads, given all settings, each with the reason."""
        return {
            key: each.otherwise for key, each in cls.notes(ReadIf) if not each.is_read(settings)
        }


class Entry(Settings):
    """Settings without defaults: each key that is present was written for its effect."""

    def problems(self) -> dict[str, bool]:
        return {
            f"{key}: has no effect {why}: remove it": key in self.model_fields_set
            for key, why in self.without_effect(vars(self)).items()
        }


def _check_regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression ({error})") from None
    return text


def _check_number(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Reject true and false, which pydantic reads as 1 and 0; return 0 for -0.0."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    number = convert(value)
    return number + 0.0 if isinstance(number, float) else number


def _check_json(value: Any) -> Any:
    """Reject what specs cannot have: infinity, a date, half of a surrogate pair."""
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError):
        raise ValueError(
            "expected text in UTF-8, finite numbers, true, false or null: quote it, or use another"
            " value"
        ) from None
    return value


IS_NUMBER = WrapValidator(_check_number)
# A value of any key, whose type the config does not know.
JsonValue = Annotated[Any, AfterValidator(_check_json)]

# Their order does not count.
SORTED = AfterValidator(lambda names: sorted(set(names)))

NonEmptyText = Annotated[str, Field(min_length=1)]
Regex = Annotated[NonEmptyText, AfterValidator(_check_regex)]
Number = Annotated[float, IS_NUMBER]
Count = Annotated[int, Field(ge=1), IS_NUMBER]
NonNegativeInt = Annotated[int, Field(ge=0), IS_NUMBER]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1), IS_NUMBER]
Positive = Annotated[float, Field(gt=0), IS_NUMBER]
NonNegative = Annotated[float, Field(ge=0), IS_NUMBER]
Fraction = Annotated[float, Field(ge=0, le=1), IS_NUMBER]
DecayRate = Annotated[float, Field(ge=0, lt=1), IS_NUMBER]

# The suffixes of files beside results and logs: no result may have such a name.
NAME_END = r"(?<![.]json)(?<![.]html)(?<![.]log)"
# No slash, no space and no leading dot: a name is a path below output/ that needs no quoting. File
# systems allow 255 bytes, of which suffixes need some. Errors show the comment of a pattern.
Name = Annotated[
    str,
    StringConstraints(
        pattern=r"(?#up to 200 letters, digits, '_', '.' and '-', a letter or digit first,"
        rf" without .json, .html or .log at the end)^[A-Za-z0-9][A-Za-z0-9_.-]{{0,199}}{NAME_END}\Z"
    ),
]

# --- training -----------------------------------------------------------------------------------

Dtype = Literal["fp32", "bf16", "fp16"]
LrSchedule = Literal["cosine", "linear", "constant"]
Template = Literal["auto", "dialogue", "chat"]


# The learning rate of a policy.
LearningRate = Annotated[
    Positive,
    ReadIf(
        # Weights other than adapters are trained, or adapters have no rate of their own.
        lambda s: not s["lora_rank"] or s["train_base"] != "none" or not s["lora_learning_rate"],
        "with lora_learning_rate: adapters have it",
    ),
]
WITH_LORA = only_with("lora_rank")
WITHOUT_LORA = ReadIf(
    lambda settings: not settings.get("lora_rank"), "with lora_rank: adapters are trained"
)
LayerNames = Annotated[list[NonEmptyText], Field(min_length=1), SORTED]


class OptimizerSettings(Settings):
    """AdamW and its learning-rate schedule."""

    lr_schedule: LrSchedule
    warmup_steps: NonNegativeInt
    min_lr_ratio: Annotated[Fraction, only_with("lr_schedule", "cosine")] = 0.0
    weight_decay: NonNegative
    adam_betas: tuple[DecayRate, DecayRate]
    max_grad_norm: Positive


class LoraSettings(Settings):
    """LoRA adapters; a rank of 0 trains all weights."""

    lora_rank: NonNegativeInt
    lora_alpha: Annotated[Positive, WITH_LORA] = ABSENT
    lora_learning_rate: Annotated[Positive | None, WITH_LORA] = None
    train_base: Annotated[Literal["none", "embeddings_and_norms"], WITH_LORA] = "none"
    # Names of layers, or a regular expression of whole names.
    lora_target_modules: Annotated[Regex | LayerNames | None, WITH_LORA] = None
    # A regular expression, found in the names of the weights that are trained.
    train_only: Annotated[Regex | None, WITHOUT_LORA] = None


class TrainingSettings(OptimizerSettings, LoraSettings):
    """Settings of every training stage."""

    seed: Seed
    epochs: Count
    max_steps: Count | None
    keep_steps: NonNegativeInt
    save_dtype: Literal["fp32"] | None
    eval_steps: NonNegativeInt
    save_strategy: Literal["last", "best"]
    early_stopping_patience: NonNegativeInt
    global_batch_size: Count
    dtype: Dtype

    def problems(self) -> dict[str, bool]:
        # Those that compare evaluations, with their values that do not.
        unused = {"save_strategy": "last", "early_stopping_patience": 0}
        return {
            f"{key}: {getattr(self, key)} needs evaluations: set eval_steps, or {key}: {value}": (
                getattr(self, key) != value and not self.eval_steps
            )
            for key, value in unused.items()
        }


class SequenceSettings(TrainingSettings):
    """Settings of the stages that train one model on tokenized sequences: sft, reward and dpo."""

    max_length: Annotated[int, Field(ge=2), IS_NUMBER]
    learning_rate: LearningRate


class SftSettings(SequenceSettings):
    """Settings of `train_sft`."""

    train_on: Literal["all_tokens", "response", "all_turns"]


class RewardSettings(SequenceSettings):
    """Settings of `train_reward`."""

    loss: Literal["last_token", "per_token"]
    # Also of the score head.
    learning_rate: Positive


# --- DPO and its variants -----------------------------------------------------------------------

PreferenceLoss = Literal["dpo", "robust", "ipo", "simpo", "orpo", "kto"]


def has_reference(loss: PreferenceLoss) -> bool:
    """Return whether a loss compares the policy with a reference model."""
    return loss not in ("simpo", "orpo")


def has_reference_point(loss: PreferenceLoss) -> bool:
    """Return whether a loss compares rewards with the rewards of responses to other prompts.

    Such a loss needs no pairs: each response is good or bad by itself.
    """
    return loss == "kto"


class PreferenceSettings(Settings):
    """The loss of a pair, or of a single response."""

    loss: PreferenceLoss
    beta: Positive
    label_smoothing: Annotated[
        float, Field(ge=0, lt=0.5), IS_NUMBER, only_with("loss", "dpo", "robust")
    ] = 0.0
    length_normalized: Annotated[bool, only_with("loss", "dpo", "robust", "ipo", "kto")] = False
    margin: Annotated[NonNegative, only_with("loss", "simpo")] = 0.0
    desirable_weight: Annotated[Positive, only_with("loss", "kto")] = 1.0
    undesirable_weight: Annotated[Positive, only_with("loss", "kto")] = 1.0
    sft_coef: NonNegative


class DpoSettings(SequenceSettings, PreferenceSettings):
    """Settings of `train_dpo`."""
