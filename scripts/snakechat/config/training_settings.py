"""Settings that all training stages share.

Standard library only: the workflow and every training program import this module.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

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


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its learning-rate schedule."""

    lr_schedule: LrSchedule
    warmup_steps: NonNegativeInt
    min_lr_ratio: Fraction
    weight_decay: NonNegative
    adam_betas: Annotated[tuple[float, float], Written(PairOfRates)]
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
