"""Settings of the reward model."""

from dataclasses import dataclass
from typing import Literal

from snakechat.config.training_settings import SequenceSettings


@dataclass(frozen=True, kw_only=True)
class RewardSettings(SequenceSettings):
    """Settings of `train_reward`."""

    loss: Literal["last_token", "per_token"]
