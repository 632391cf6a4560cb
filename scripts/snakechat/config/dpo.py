"""Settings of direct preference optimization (DPO) and its variants."""

from typing import Annotated, Literal

from pydantic import Field

from snakechat.config.settings import IS_NUMBER, NonNegative, Positive, Settings
from snakechat.config.training_settings import POLICY_CONDITIONS, Conditional, SequenceSettings

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
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), IS_NUMBER] = 0.0
    length_normalized: bool = False
    margin: NonNegative = 0.0
    desirable_weight: Positive = 1.0
    undesirable_weight: Positive = 1.0
    sft_coef: NonNegative


class DpoSettings(SequenceSettings, PreferenceSettings):
    """Settings of `train_dpo`."""


def _of_losses(keys: tuple[str, ...], *losses: PreferenceLoss) -> Conditional:
    """Return the condition of settings that only some losses use."""
    return Conditional(
        keys,
        lambda settings: settings["loss"] in losses,
        f"with loss: {{loss}}, only with {' and '.join(losses)}",
    )


DPO_CONDITIONS = (
    *POLICY_CONDITIONS,
    _of_losses(("label_smoothing",), "dpo", "robust"),
    _of_losses(("margin",), "simpo"),
    _of_losses(("desirable_weight", "undesirable_weight"), "kto"),
    _of_losses(("length_normalized",), "dpo", "robust", "ipo", "kto"),
)
