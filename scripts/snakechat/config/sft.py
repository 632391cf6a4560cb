"""Settings of supervised fine-tuning (SFT)."""

from typing import Literal

from snakechat.config.training_settings import SequenceSettings


class SftSettings(SequenceSettings):
    """Settings of `train_sft`."""

    train_on: Literal["all_tokens", "response", "all_turns"]
