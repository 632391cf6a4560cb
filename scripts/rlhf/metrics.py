"""Figures of a run: one JSON line for each step, TensorBoard scalars, intervals."""

import json
import math
import shutil

import numpy as np
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from rlhf.job import InputError


class StepLog:
    """Writes metrics.jsonl into the result and TensorBoard scalars beside the log.

    The lines have no times in them, so that the same build gives the same bytes. A resumed run goes
    on behind the lines that it finds.
    """

    def __init__(self, job, num_steps):
        self.file = (job.result / "metrics.jsonl").open("a+")
        board = job.log_folder / "tensorboard"
        shutil.rmtree(board, ignore_errors=True)
        self.board = SummaryWriter(board)
        self.file.seek(0)
        before = [json.loads(line) for line in self.file]
        for figures in before:
            self._draw(figures.pop("step"), figures)
        self.bar = tqdm(
            total=num_steps,
            initial=len(before),
            desc=job.spec["rule"],
            unit="step",
            mininterval=2,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()
        self.board.close()
        self.bar.close()

    def write(self, step, shown, **figures):
        """Log a step's figures; those named in shown stand beside the progress bar.

        Raises InputError for a figure that is no number: the run has diverged.
        """
        for name, value in figures.items():
            if not math.isfinite(value):
                raise InputError(
                    f"step {step}: {name} is {value}: the run has diverged;"
                    " a lower learning rate may help"
                )
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
