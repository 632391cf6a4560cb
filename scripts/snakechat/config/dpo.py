"""Settings of direct preference optimization (DPO) and its variants."""

from dataclasses import dataclass
from typing import Annotated, Literal

from snakechat.config.training_settings import SequenceSettings
from snakechat.workflow.value_types import Keyword, NonNegative, Positive

PreferenceLoss = Literal["dpo", "robust", "ipo", "simpo", "orpo", "kto"]

# Settings that some losses ignore: the value that has no effect, and the losses that use others.
LOSSES_WITH: dict[str, tuple[float, tuple[PreferenceLoss, ...]]] = {
    "label_smoothing": (0, ("dpo", "robust")),
    "margin": (0, ("simpo",)),
    "desirable_weight": (1, ("kto",)),
    "undesirable_weight": (1, ("kto",)),
}


def has_reference(loss: PreferenceLoss) -> bool:
    """Return whether a loss compares the policy with a reference model."""
    return loss not in ("simpo", "orpo")


def has_reference_point(loss: PreferenceLoss) -> bool:
    """Return whether a loss compares rewards with those of responses to other prompts.

    Such a loss needs no pairs: each response is good or bad by itself.
    """
    return loss == "kto"


@dataclass(frozen=True, kw_only=True)
class PreferenceSettings:
    """The loss of a pair, or of a single response."""

    loss: PreferenceLoss
    beta: Positive
    label_smoothing: Annotated[float, Keyword("ge", 0), Keyword("lt", 0.5)]
    length_normalized: bool
    margin: NonNegative
    desirable_weight: Positive
    undesirable_weight: Positive
    sft_coef: NonNegative


@dataclass(frozen=True, kw_only=True)
class DpoSettings(SequenceSettings, PreferenceSettings):
    """Settings of `train_dpo`."""
