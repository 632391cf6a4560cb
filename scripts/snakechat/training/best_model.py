"""The model with the lowest evaluation loss of a run so far."""

import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from snakechat.training.checkpointing import CHECKPOINTS_KEPT
from snakechat.workflow.distributed import barrier, rank
from snakechat.workflow.job import Job


class BestModel:
    """Tracks the lowest evaluation loss and keeps a copy of the model that has it.

    Copies lie next to the checkpoints of the run. A copy is deleted when no remaining checkpoint
    refers to it.

    Args:
        job: The job, for its folder of checkpoints.
        save: Writes the model into a folder; None keeps no copies.

    Attributes:
        step, loss: Step and loss of the best evaluation.
        evaluations_since: Number of evaluations since the best one.
    """

    def __init__(self, job: Job[Any], save: Callable[[Path], None] | None) -> None:
        self.folder, self.save = job.states, save
        # Best steps to which the remaining checkpoints refer.
        self.referenced_steps: list[int] = []
        self.step, self.loss, self.evaluations_since = 0, math.inf, 0

    def update(self, step: int, loss: float) -> None:
        """Record the evaluation after a step and copy the model if its loss is the lowest."""
        self.evaluations_since += 1
        # Negated, because every comparison with NaN is false.
        if not loss < self.loss:
            return
        self.step, self.loss, self.evaluations_since = step, loss, 0
        if self.save is None:
            return
        self.save(self.folder / ".best")
        barrier()
        if rank() == 0:
            referenced = {self._copy_of(best) for best in self.referenced_steps}
            for copy in self.folder.glob("best-*"):
                if copy not in referenced:
                    shutil.rmtree(copy)
            os.replace(self.folder / ".best", self._copy_of(step))

    def copy_to(self, folder: Path) -> None:
        """Copy the best model into a folder."""
        if rank() == 0:
            shutil.copytree(self._copy_of(self.step), folder, dirs_exist_ok=True)

    def _copy_of(self, step: int) -> Path:
        return self.folder / f"best-{step}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a checkpoint."""
        self.referenced_steps = [*self.referenced_steps, self.step][-CHECKPOINTS_KEPT:]
        # JSON has no infinity.
        loss = None if self.step == 0 else self.loss
        return {"step": self.step, "loss": loss, "since": self.evaluations_since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.step, self.evaluations_since = state["step"], state["since"]
        self.referenced_steps = [self.step]
        self.loss = math.inf if state["loss"] is None else state["loss"]
