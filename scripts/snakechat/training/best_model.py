"""The best model of a run so far, by its loss on held-out rows, kept where states are kept."""

import math
import os
import shutil

from snakechat.training.checkpointing import KEPT
from snakechat.workflow.distributed import barrier, rank


class Best:
    """A part of a resumable run: the lowest loss that was offered, and the model that has it.

    save: a function that writes the model into a folder; None keeps no models. since: evaluations
    since the lowest one.
    """

    def __init__(self, job, save):
        self.states, self.save = job.states, save
        # The best steps that the states tell of from which the run may have to go on.
        self.named = []
        self.step, self.loss, self.since = 0, math.inf, 0

    def offer(self, step, loss):
        """Keep the model as it is after a step, if its loss is the lowest."""
        self.since += 1
        # Not >=, which lets NaN pass.
        if not loss < self.loss:
            return
        self.step, self.loss, self.since = step, loss, 0
        if self.save is None:
            return
        self.save(self.states / ".best")
        barrier()
        if rank() == 0:
            needed = {self._folder(known) for known in self.named}
            for old in self.states.glob("best-*"):
                if old not in needed:
                    shutil.rmtree(old)
            os.replace(self.states / ".best", self._folder(step))

    def copy_to(self, folder):
        """Copy the best model into a folder."""
        if rank() == 0:
            shutil.copytree(self._folder(self.step), folder, dirs_exist_ok=True)

    def _folder(self, step):
        return self.states / f"best-{step}"

    def state(self):
        """For a run that is resumed."""
        self.named = [*self.named, self.step][-KEPT:]
        # JSON has no infinity.
        loss = None if self.step == 0 else self.loss
        return {"step": self.step, "loss": loss, "since": self.since}

    def restore(self, state):
        """Put a state back."""
        self.step, self.since = state["step"], state["since"]
        self.named = [self.step]
        self.loss = math.inf if state["loss"] is None else state["loss"]
