"""The moving average of a model in training, which is often better than its last state."""

import contextlib


class Ema:
    """average = decay * average + (1 - decay) * weight of all that an engine trains, in fp32.

    It is cut up among processes as the engine's masters are.
    """

    def __init__(self, engine, decay):
        self.engine, self.decay = engine, decay
        self.averages = [master.detach().clone() for master in engine.masters]

    def update(self):
        """Take a step's weights in."""
        for average, master in zip(self.averages, self.engine.masters, strict=True):
            average.lerp_(master.detach(), 1 - self.decay)

    @contextlib.contextmanager
    def in_place(self):
        """While it lasts, the module has the averages for its weights."""
        self._swap()
        yield
        self._swap()

    def _swap(self):
        for average, master in zip(self.averages, self.engine.masters, strict=True):
            weights = master.detach().clone()
            master.data.copy_(average)
            average.copy_(weights)
        self.engine.update_weights()

    def state(self):
        """For a run that is resumed."""
        return {str(index): average for index, average in enumerate(self.averages)}

    def restore(self, state):
        """Put a state back."""
        for index, average in enumerate(self.averages):
            average.copy_(state[str(index)])
