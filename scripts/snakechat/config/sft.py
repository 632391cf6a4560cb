"""Settings of supervised fine-tuning (SFT)."""

from typing import Literal

from snakechat.config.settings import ABSENT, Count
from snakechat.config.training_settings import POLICY_CONDITIONS, Conditional, SequenceSettings


class SftSettings(SequenceSettings):
    """Settings of `train_sft`."""

    train_on: Literal["all_tokens", "response", "all_turns"]
    # A reference (snakechat/config/references.py).
    teacher: str | None
    teacher_top_k: Count = ABSENT


SFT_CONDITIONS = (
    *POLICY_CONDITIONS,
    Conditional(
        ("teacher_top_k",), lambda settings: settings["teacher"] is not None, "without teacher"
    ),
)
