"""Settings of supervised fine-tuning (SFT)."""

from dataclasses import dataclass

from snakechat.config.common import SequenceSettings


@dataclass(frozen=True, kw_only=True)
class SftSettings(SequenceSettings):
    """Settings of `train_sft`."""

    train_on_prompt: bool
