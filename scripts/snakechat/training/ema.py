"""Exponential moving average of the weights in training."""

import contextlib
from collections.abc import Iterator, Mapping

import torch

from snakechat.training.engine import Engine


class Ema:
    """average = decay * average + (1 - decay) * weight, in fp32, of all weights that are trained.

    The averages are partitioned over processes in the same way as the master weights.
    """

    def __init__(self, engine: Engine, decay: float) -> None:
        self.engine, self.decay = engine, decay
        self.averages = [master.detach().clone() for master in engine.master_weights]

    def update(self) -> None:
        """Update the averages with the weights after a step."""
        for average, master in zip(self.averages, self.engine.master_weights, strict=True):
            average.lerp_(master.detach(), 1 - self.decay)

    @contextlib.contextmanager
    def average_weights(self) -> Iterator[None]:
        """Replace the weights of the module by their averages within the context."""
        self._swap()
        yield
        self._swap()

    def _swap(self) -> None:
        for average, master in zip(self.averages, self.engine.master_weights, strict=True):
            weights = master.detach().clone()
            master.data.copy_(average)
            average.copy_(weights)
        self.engine.update_weights()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of a checkpoint."""
        return {str(index): average for index, average in enumerate(self.averages)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the state of a checkpoint."""
        for index, average in enumerate(self.averages):
            average.copy_(state[str(index)])
