"""Settings of direct preference optimization (DPO)."""

from dataclasses import dataclass
from typing import Annotated

from snakechat.config.common import Keyword, Positive, SequenceSettings


@dataclass(frozen=True, kw_only=True)
class DpoSettings(SequenceSettings):
    """Settings of `train_dpo`."""

    beta: Positive
    label_smoothing: Annotated[float, Keyword("minimum", 0), Keyword("exclusiveMaximum", 0.5)]
