"""The coefficient of the KL penalty, which experience.py and policy_updates.py apply."""

from collections.abc import Mapping
from typing import Any

from snakechat.algorithms import policy_gradient
from snakechat.config.rlhf import RlhfSettings


class KLController:
    """Holds kl_coef: constant, or adapted towards kl_target (Ziegler et al. 2019, section 2.2)."""

    def __init__(self, settings: RlhfSettings) -> None:
        self.coef = settings.kl_coef
        self.target, self.horizon = settings.kl_target, settings.kl_horizon

    def update(self, kl: float, num_responses: int) -> None:
        """Adapt the coefficient to the mean KL of a step, in nats per response."""
        if self.target is not None:
            self.coef = policy_gradient.adapted_kl_coef(
                self.coef, kl, self.target, self.horizon, num_responses
            )

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coef = state["coef"]
