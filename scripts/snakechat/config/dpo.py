"""Settings of direct preference optimization (DPO) and its variants."""

from typing import Annotated, Literal

from pydantic import Field

from snakechat.config.settings import (
    IS_NUMBER,
    NonNegative,
    Positive,
    Settings,
    only_with,
)
from snakechat.config.training_settings import SequenceSettings

PreferenceLoss = Literal["dpo", "robust", "ipo", "simpo", "orpo", "kto"]


def has_reference(loss: PreferenceLoss) -> bool:
    """Return whether a loss compares the policy with a reference model."""
    return loss not in ("simpo", "orpo")


def has_reference_point(loss: PreferenceLoss) -> bool:
    """Return whether a loss compares rewards with the rewards of responses to other prompts.

    Such a loss needs no pairs: each response is good or bad by itself.
    """
    return loss == "kto"


class PreferenceSettings(Settings):
    """The loss of a pair, or of a single response."""

    loss: PreferenceLoss
    beta: Positive
    label_smoothing: Annotated[
        float, Field(ge=0, lt=0.5), IS_NUMBER, only_with("loss", "dpo", "robust")
    ] = 0.0
    length_normalized: Annotated[bool, only_with("loss", "dpo", "robust", "ipo", "kto")] = False
    margin: Annotated[NonNegative, only_with("loss", "simpo")] = 0.0
    desirable_weight: Annotated[Positive, only_with("loss", "kto")] = 1.0
    undesirable_weight: Annotated[Positive, only_with("loss", "kto")] = 1.0
    sft_coef: NonNegative


class DpoSettings(SequenceSettings, PreferenceSettings):
    """Settings of `train_dpo`."""
