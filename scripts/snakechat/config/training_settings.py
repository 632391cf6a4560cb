"""Settings that training stages share, and the settings of SFT and of reward models."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from snakechat.config.settings import (
    ABSENT,
    Count,
    DecayRate,
    Fraction,
    NonEmptyText,
    NonNegative,
    NonNegativeInt,
    Positive,
    ReadIf,
    Regex,
    Seed,
    SequenceLength,
    Settings,
    only_with,
)

Dtype = Literal["fp32", "bf16", "fp16"]
LrSchedule = Literal["cosine", "linear", "constant"]
Template = Literal["auto", "dialogue", "chat"]


def _trains_more_than_adapters(settings: Mapping[str, Any]) -> bool:
    """Return whether weights other than adapters are trained, or adapters have no own rate."""
    adapters_alone = settings["lora_rank"] and settings["train_base"] == "none"
    return not adapters_alone or settings["lora_learning_rate"] is None


# The learning rate of a policy.
LearningRate = Annotated[
    Positive,
    ReadIf(_trains_more_than_adapters, "with lora_learning_rate: adapters have it"),
]
WITH_LORA = only_with("lora_rank")
WITHOUT_LORA = ReadIf(
    lambda settings: not settings.get("lora_rank"), "with lora_rank: adapters are trained"
)
LayerNames = Annotated[
    list[NonEmptyText], Field(min_length=1), AfterValidator(lambda names: sorted(set(names)))
]


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

    max_length: SequenceLength
    learning_rate: LearningRate


class SftSettings(SequenceSettings):
    """Settings of `train_sft`."""

    train_on: Literal["all_tokens", "response", "all_turns"]


class RewardSettings(SequenceSettings):
    """Settings of `train_reward`."""

    loss: Literal["last_token", "per_token"]
    # Also of the score head.
    learning_rate: Positive
