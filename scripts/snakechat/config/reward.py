"""Settings of the reward model."""

from typing import Literal

from snakechat.config.training_settings import SequenceSettings


class RewardSettings(SequenceSettings):
    """Settings of `train_reward`."""

    loss: Literal["last_token", "per_token"]
