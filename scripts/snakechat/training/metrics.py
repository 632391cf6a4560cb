"""Figures of a run: one JSON line for each step, TensorBoard scalars."""

import contextlib
import json
import math
import shutil
import statistics
import time

import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from snakechat.workflow.distributed import rank
from snakechat.workflow.errors import InputError


class MetricsLogger:
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
        self.times = job.log_folder / "times.jsonl"
        if step == 0:
            self.times.unlink(missing_ok=True)

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

    def write_times(self, step, seconds, tokens, **counts):
        """Keep how long a step took, which no two runs share, in times.jsonl beside the log.

        seconds: {part: seconds}; tokens and counts: what the step worked on.
        """
        rate = tokens / sum(seconds.values())
        figures = {**seconds, **counts, "tokens": tokens, "tokens_per_second": rate}
        if rank() == 0:
            with self.times.open("a") as file:
                file.write(json.dumps({"step": step, **figures}) + "\n")
            self._draw(step, {f"times/{name}": value for name, value in figures.items()})

    def _draw(self, step, figures):
        for name, value in figures.items():
            self.board.add_scalar(name, value, step)


class StepTimer:
    """Seconds that parts of a step take, of the last step by name."""

    def __init__(self, device):
        self.device, self.seconds, self.taken = device, {}, {}

    @contextlib.contextmanager
    def __call__(self, part):
        """Count the time that it lasts under a name."""
        started = self._now()
        yield
        self.seconds[part] = round(self._now() - started, 6)
        self.taken.setdefault(part, []).append(self.seconds[part])

    def medians(self):
        """Median seconds of each part."""
        return {part: statistics.median(taken) for part, taken in self.taken.items()}

    def _now(self):
        # A GPU works on while Python goes ahead.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def write_json(path, value):
    """Write a result's figures, keys sorted."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
