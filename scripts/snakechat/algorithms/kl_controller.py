"""The weight of the KL to the reference."""

from snakechat.algorithms import ppo


class KLController:
    """kl_coef, which with a kl_target is steered to it."""

    def __init__(self, settings):
        self.coef = settings.kl_coef
        self.target, self.horizon = settings.kl_target, settings.kl_horizon

    def update(self, kl, responses):
        """kl: nats of a response, the mean of so many responses."""
        if self.target is not None:
            self.coef = ppo.adapted_kl_coef(self.coef, kl, self.target, self.horizon, responses)

    def state(self):
        """For a run that is resumed."""
        return {"coef": self.coef}

    def restore(self, state):
        """Put a state back."""
        self.coef = state["coef"]
