"""Settings of direct preference optimization (DPO) and its variants."""

from dataclasses import dataclass
from typing import Annotated, Literal

from snakechat.config.common import Keyword, NonNegative, Positive, SequenceSettings

PreferenceLoss = Literal["dpo", "robust", "ipo", "simpo", "orpo"]

# Losses that a setting has an effect on, of settings that others would ignore.
LOSSES_WITH: dict[str, tuple[PreferenceLoss, ...]] = {
    "label_smoothing": ("dpo", "robust"),
    "margin": ("simpo",),
}


def has_reference(loss: PreferenceLoss) -> bool:
    """Return whether a loss compares the policy with a reference model."""
    return loss not in ("simpo", "orpo")


@dataclass(frozen=True, kw_only=True)
class PreferenceSettings:
    """The loss of a pair."""

    loss: PreferenceLoss
    beta: Positive
    label_smoothing: Annotated[float, Keyword("minimum", 0), Keyword("exclusiveMaximum", 0.5)]
    length_normalized: bool
    margin: NonNegative
    sft_coef: NonNegative


@dataclass(frozen=True, kw_only=True)
class DpoSettings(SequenceSettings, PreferenceSettings):
    """Settings of `train_dpo`."""
