"""Settings of supervised fine-tuning (SFT)."""

from dataclasses import dataclass
from typing import Annotated, Literal

from snakechat.config.training_settings import SequenceSettings
from snakechat.workflow.value_types import Count, NonNegativeInt, Written


@dataclass(frozen=True, kw_only=True)
class SftSettings(SequenceSettings):
    """Settings of `train_sft`."""

    train_on: Literal["all_tokens", "response", "all_turns"]
    # A reference (snakechat/config/references.py).
    teacher: str | None
    # Without a teacher, a program receives 0.
    teacher_top_k: Annotated[NonNegativeInt, Written(Count)]
