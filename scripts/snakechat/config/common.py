"""Settings that all training stages share, and the types of their values.

The types carry their constraints as keywords of JSON Schema: `snakechat.config.schema` derives the
schema of config.yaml from them. Standard library only: the workflow and every training program
import this module.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal


@dataclass(frozen=True)
class Keyword:
    """A keyword of JSON Schema that constrains an annotated type: Keyword("minimum", 1)."""

    name: str
    value: Any = field(hash=False)


@dataclass(frozen=True)
class Written:
    """The type that a key has in config.yaml, where a program receives another one."""

    type: Any


Count = Annotated[int, Keyword("minimum", 1)]
NonNegativeInt = Annotated[int, Keyword("minimum", 0)]
Positive = Annotated[float, Keyword("exclusiveMinimum", 0)]
NonNegative = Annotated[float, Keyword("minimum", 0)]
Fraction = Annotated[float, Keyword("minimum", 0), Keyword("maximum", 1)]
DecayRate = Annotated[float, Keyword("minimum", 0), Keyword("exclusiveMaximum", 1)]
SequenceLength = Annotated[int, Keyword("minimum", 2)]
Seed = Annotated[int, Keyword("minimum", 0), Keyword("maximum", 2**32 - 1)]

# No slash, no space and no leading dot: a name is a path below output/ that needs no quoting.
Name = Annotated[str, Keyword("pattern", r"^[A-Za-z0-9][A-Za-z0-9_.-]*$(?<![.]json)")]

EnvironmentVariable = Annotated[str, Keyword("pattern", "^[A-Za-z_][A-Za-z0-9_]*$")]

Dtype = Literal["fp32", "bf16", "fp16"]
SaveDtype = Literal["fp32"]
SaveStrategy = Literal["last", "best"]
LrSchedule = Literal["cosine", "linear", "constant"]
Template = Literal["auto", "dialogue", "chat"]
TrainBase = Literal["none", "embeddings_and_norms"]

# The name of a dataset, or {name: weight}.
WeightedDataset = Annotated[
    dict[str, Positive], Keyword("minProperties", 1), Keyword("maxProperties", 1)
]
DatasetList = Annotated[
    list[str | WeightedDataset], Keyword("minItems", 1), Keyword("uniqueItems", True)
]
# A program receives the name and the weight of each dataset.
Blend = Annotated[list[tuple[str, float]], Written(DatasetList)]


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its learning-rate schedule."""

    lr_schedule: LrSchedule
    warmup_steps: NonNegativeInt
    min_lr_ratio: Fraction
    weight_decay: NonNegative
    adam_betas: tuple[DecayRate, DecayRate]
    max_grad_norm: Positive


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """LoRA adapters; a rank of 0 trains all weights."""

    lora_rank: NonNegativeInt
    lora_alpha: Positive
    lora_learning_rate: Positive | None
    train_base: TrainBase


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
