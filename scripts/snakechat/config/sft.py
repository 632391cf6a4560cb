"""Settings of supervised fine-tuning (SFT)."""

from dataclasses import dataclass
from typing import Literal

from snakechat.config.common import NonNegativeInt, SequenceSettings


@dataclass(frozen=True, kw_only=True)
class SftSettings(SequenceSettings):
    """Settings of `train_sft`."""

    train_on_prompt: bool
    eval_steps: NonNegativeInt
    save_strategy: Literal["last", "best"]
    early_stopping_patience: NonNegativeInt
