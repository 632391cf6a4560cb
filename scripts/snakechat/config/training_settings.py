"""Settings that training stages share, and those of SFT and of reward models."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, Field, GetPydanticSchema, model_validator
from pydantic.json_schema import SkipJsonSchema

from snakechat.config.settings import (
    ABSENT,
    Count,
    DecayRate,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    Seed,
    SequenceLength,
    Settings,
)

Dtype = Literal["fp32", "bf16", "fp16"]
SaveDtype = Literal["fp32"]
SaveStrategy = Literal["last", "best"]
LrSchedule = Literal["cosine", "linear", "constant"]
Template = Literal["auto", "dialogue", "chat"]
TrainBase = Literal["none", "embeddings_and_norms"]


def _named_weights(
    entries: list[str | dict[str, float] | tuple[str, float]],
) -> list[tuple[str, float]]:
    """Return the name and the weight of each dataset; the weight defaults to 1."""
    pairs: list[tuple[str, float]] = []
    for entry in entries:
        if isinstance(entry, dict):
            pairs += entry.items()
        else:
            pairs.append((entry, 1.0) if isinstance(entry, str) else entry)
    if len(pairs) > len(dict(pairs)):
        raise ValueError("names a dataset twice: use a weight")
    return pairs


# In a recipe, a dataset is its name, or {name: weight}; in a spec, the name and the weight.
WeightedDataset = Annotated[dict[str, Positive], Field(min_length=1, max_length=1)]
DatasetList = Annotated[
    list[str | WeightedDataset | SkipJsonSchema[tuple[str, Positive]]],
    Field(min_length=1),
    AfterValidator(_named_weights),
]
Blend = Annotated[
    list[tuple[str, float]], GetPydanticSchema(lambda _, handler: handler(DatasetList))
]


class Conditional(NamedTuple):
    """Settings that have an effect in some recipes only.

    Attributes:
        keys: The settings.
        has_effect: Whether they have an effect, given all settings of a recipe.
        otherwise: When they have none, for the error: a text that names settings in braces.
    """

    keys: tuple[str, ...]
    has_effect: Callable[[Mapping[str, Any]], bool]
    otherwise: str


class OptimizerSettings(Settings):
    """AdamW and its learning-rate schedule."""

    lr_schedule: LrSchedule
    warmup_steps: NonNegativeInt
    min_lr_ratio: Fraction = 0.0
    weight_decay: NonNegative
    adam_betas: tuple[DecayRate, DecayRate]
    max_grad_norm: Positive


class LoraSettings(Settings):
    """LoRA adapters; a rank of 0 trains all weights."""

    lora_rank: NonNegativeInt
    lora_alpha: Positive = ABSENT
    lora_learning_rate: Positive | None = None
    train_base: TrainBase = "none"


class TrainingSettings(OptimizerSettings, LoraSettings):
    """Settings of every training stage."""

    seed: Seed
    datasets: Blend
    epochs: Count
    max_steps: Count | None
    keep_steps: NonNegativeInt
    save_dtype: SaveDtype | None
    eval_steps: NonNegativeInt
    save_strategy: SaveStrategy
    early_stopping_patience: NonNegativeInt
    global_batch_size: Count
    dtype: Dtype

    @model_validator(mode="after")
    def _check_evaluations(self) -> Self:
        """Check that settings which compare evaluations have evaluations to compare."""
        for key, unused in (("save_strategy", "last"), ("early_stopping_patience", 0)):
            value = getattr(self, key)
            if value != unused and not self.eval_steps:
                raise ValueError(
                    f"{key}: {value} needs evaluations during training: set eval_steps, or"
                    f" {key}: {unused}"
                )
        return self


class SequenceSettings(TrainingSettings):
    """Settings of the stages that train one model on tokenized sequences: sft, reward and dpo."""

    model: str
    max_length: SequenceLength
    learning_rate: Positive
    # Not a key of a recipe: the model determines it.
    template: Template = ABSENT


class SftSettings(SequenceSettings):
    """Settings of `train_sft`."""

    train_on: Literal["all_tokens", "response", "all_turns"]


class RewardSettings(SequenceSettings):
    """Settings of `train_reward`."""

    loss: Literal["last_token", "per_token"]


def learning_rate_has_effect(settings: Mapping[str, Any]) -> bool:
    """Return whether weights other than adapters are trained, or adapters have no own rate."""
    adapters_alone = settings["lora_rank"] and settings["train_base"] == "none"
    return not adapters_alone or settings["lora_learning_rate"] is None


# Of all stages that train.
LORA_CONDITION = Conditional(
    ("lora_alpha", "lora_learning_rate", "train_base"),
    lambda settings: settings["lora_rank"] > 0,
    "without lora_rank",
)
# Of sft, reward and dpo.
SEQUENCE_CONDITIONS = (
    LORA_CONDITION,
    Conditional(
        ("min_lr_ratio",),
        lambda settings: settings["lr_schedule"] == "cosine",
        "with lr_schedule: {lr_schedule}",
    ),
)
# Of sft and dpo. A reward model also trains its score head.
POLICY_CONDITIONS = (
    *SEQUENCE_CONDITIONS,
    Conditional(
        ("learning_rate",), learning_rate_has_effect, "with lora_learning_rate: adapters have it"
    ),
)
