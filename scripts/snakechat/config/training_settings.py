"""Settings that all training stages share.

Standard library only: the workflow and every training program import this module.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from snakechat.workflow.value_types import (
    Count,
    DecayRate,
    Fraction,
    Keyword,
    NonNegative,
    NonNegativeInt,
    Positive,
    Seed,
    SequenceLength,
    Written,
)

Dtype = Literal["fp32", "bf16", "fp16"]
SaveDtype = Literal["fp32"]
SaveStrategy = Literal["last", "best"]
LrSchedule = Literal["cosine", "linear", "constant"]
Template = Literal["auto", "dialogue", "chat"]
TrainBase = Literal["none", "embeddings_and_norms"]

# The name of a dataset, or {name: weight}.
WeightedDataset = Annotated[dict[str, Positive], Keyword("min_length", 1), Keyword("max_length", 1)]
DatasetList = Annotated[list[str | WeightedDataset], Keyword("min_length", 1)]
PairOfRates = Annotated[list[DecayRate], Keyword("min_length", 2), Keyword("max_length", 2)]
# A program receives the name and the weight of each dataset.
Blend = Annotated[list[tuple[str, float]], Written(DatasetList)]

# The default of a setting that a spec omits because nothing reads it.
UNREAD: Any = None


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


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its learning-rate schedule."""

    lr_schedule: LrSchedule
    warmup_steps: NonNegativeInt
    min_lr_ratio: Fraction = 0.0
    weight_decay: NonNegative
    adam_betas: Annotated[tuple[float, float], Written(PairOfRates)]
    max_grad_norm: Positive


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """LoRA adapters; a rank of 0 trains all weights."""

    lora_rank: NonNegativeInt
    lora_alpha: Positive = UNREAD
    lora_learning_rate: Positive | None = None
    train_base: TrainBase = "none"


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class SequenceSettings(TrainingSettings):
    """Settings of the stages that train one model on tokenized sequences: sft, reward and dpo."""

    model: str
    max_length: SequenceLength
    learning_rate: Positive
    # Not a key of a recipe: the model determines it.
    template: Template


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
