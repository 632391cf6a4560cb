"""Figures of a run: one JSON line for each step, TensorBoard scalars, intervals."""

import contextlib
import json
import math
import shutil

import numpy as np
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from rlhf.job import InputError
from rlhf.ranks import rank


class StepLog:
    """Writes metrics.jsonl into the result and TensorBoard scalars beside the log.

    The lines have no times in them, so that the same build gives the same bytes. A resumed run goes
    on behind the lines that it finds. Of several processes the first one writes.
    """

    def __init__(self, job, num_steps):
        self.open = contextlib.ExitStack()
        if rank() > 0:
            return
        self.file = self.open.enter_context((job.result / "metrics.jsonl").open("a+"))
        board = job.log_folder / "tensorboard"
        shutil.rmtree(board, ignore_errors=True)
        self.board = self.open.enter_context(SummaryWriter(board))
        self.file.seek(0)
        step = 0
        for line in self.file:
            figures = json.loads(line)
            step = figures.pop("step")
            self._draw(step, figures)
        bar = tqdm(
            total=num_steps,
            initial=step,
            desc=job.spec["rule"],
            unit="step",
            mininterval=2,
        )
        self.bar = self.open.enter_context(bar)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.open.close()

    def write(self, step, shown, rows=(), **figures):
        """Log a step's figures; those named in shown stand beside the progress bar.

        rows: what the step was trained on. A figure that the step does not have is None, and left
        out. Raises InputError for one that is no number: the run has diverged.
        """
        figures = {name: value for name, value in figures.items() if value is not None}
        for name, value in figures.items():
            if not math.isfinite(value):
                raise InputError(
                    f"step {step}, rows {sorted(map(int, rows))}: {name} is {value}: the run has"
                    " diverged; a lower learning rate may help"
                )
        if rank() > 0:
            return
        self.file.write(json.dumps({"step": step, **figures}) + "\n")
        self.file.flush()
        self._draw(step, figures)
        figures = {name.split("/")[-1]: f"{figures[name]:.3f}" for name in shown}
        self.bar.set_postfix(figures, refresh=False)
        self.bar.update(step - self.bar.n)

    def _draw(self, step, figures):
        for name, value in figures.items():
            self.board.add_scalar(name, value, step)


def write_json(path, value):
    """Write a result's figures, keys sorted."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def bootstrap_interval(values, resamplings, seed):
    """95 % percentile interval of the mean of values [n], by resampling them (Efron 1979)."""
    values = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(seed)
    means = [random.choice(values, len(values)).mean() for _ in range(resamplings)]
    return [float(bound) for bound in np.percentile(means, [2.5, 97.5])]
