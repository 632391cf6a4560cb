"""Metrics and responses of a run: JSON lines, TensorBoard, lines about the progress."""

import contextlib
import json
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from snakechat.workflow.errors import InputError, ProgressLines
from snakechat.workflow.job import Job, peak_memory_mb
from snakechat.workflow.processes import rank

# Metrics that lines about the progress show where a step has them: their names there.
SHOWN = {
    "learning_rate": "learning rate",
    "policy/learning_rate": "learning rate",
    "skipped_steps": "skipped",
    "policy/skipped_steps": "skipped",
}


class MetricsLogger(contextlib.ExitStack):
    """Writes metrics.jsonl and responses.jsonl into the result, and metrics to TensorBoard.

    The lines contain no times, so that two builds give the same bytes. A run that resumes after
    last_step appends to the existing lines. Only the first process writes.
    """

    def __init__(self, job: Job[Any], num_steps: int, last_step: int = 0) -> None:
        super().__init__()
        if rank() > 0:
            return
        self.file = self.enter_context((job.result / "metrics.jsonl").open("a+"))
        # Evaluations, which log no metrics, import this module too.
        from torch.utils.tensorboard import SummaryWriter

        tensorboard = job.log_folder / "tensorboard"
        shutil.rmtree(tensorboard, ignore_errors=True)
        self.tensorboard = self.enter_context(SummaryWriter(tensorboard))
        self.responses = job.result / "responses.jsonl"
        self.file.seek(0)
        for metrics in map(json.loads, self.file):
            self._add_scalars(metrics.pop("step"), metrics)
        name, self.throughput = f"{job.spec['rule']} {job.spec['name']}", list[str]()
        self.progress = ProgressLines(name, "steps", num_steps, last_step, next_line=0)
        self.times = job.log_folder / "times.jsonl"
        if last_step == 0:
            self.times.unlink(missing_ok=True)

    def log(
        self,
        step: int,
        metrics: Mapping[str, float | None] | None = None,
        evaluation: Mapping[str, float] | None = None,
        shown: Sequence[str] = (),
        rows: Sequence[int] = (),
    ) -> None:
        """Log the metrics of a step. Raises InputError if one is not finite.

        Args:
            metrics: By name; None stands for one that this step does not have.
            evaluation: Metrics on held-out rows as `eval_NAME`, if there are any.
            shown: Names of the metrics in lines about the progress.
            rows: Rows of the step, for the error message.
        """
        found = {**(metrics or {}), **(evaluation or {})}.items()
        values = {name: value for name, value in found if value is not None}
        for name, value in values.items():
            if not math.isfinite(value):
                raise InputError(
                    f"step {step}, rows {rows}: {name} is {value}, training has diverged: try a"
                    " lower learning rate"
                )
        if rank() > 0:
            return
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        self._add_scalars(step, values)
        if evaluation:
            held_out = [f"{k.removeprefix('eval_')} {v:.4g}" for k, v in evaluation.items()]
            self.progress.print(step, f"on held-out rows: {', '.join(held_out)}")
        elif self.progress.is_due(step):
            names = {name: name.rpartition("/")[2] for name in shown} | SHOWN
            parts = [f"{names[name]} {values[name]:.4g}" for name in names if name in values]
            parts += self.throughput
            gigabytes, where = peak_memory_mb() / 1024, "memory"
            if torch.cuda.is_available():
                gigabytes, where = torch.cuda.max_memory_allocated() / (1 << 30), "GPU memory"
            self.progress.print(step, *parts, f"{gigabytes:.1f} GiB of {where}")

    def log_step(
        self,
        step: int,
        seconds: Mapping[str, float],
        tokens: int,
        responses: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Append the times of a step to times.jsonl in the log folder, and its responses."""
        if rank() > 0:
            return
        if responses:
            lines = ({"step": step, **line} for line in responses)
            write_json_lines(self.responses, lines, "a")
        tokens_per_second = tokens / sum(seconds.values())
        values = {**seconds, "tokens": tokens, "tokens_per_second": tokens_per_second}
        self.throughput = [f"{tokens_per_second:,.0f} tokens/s"]
        write_json_lines(self.times, [{"step": step, **values}], "a")
        self._add_scalars(step, {f"times/{name}": value for name, value in values.items()})

    def _add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.tensorboard.add_scalar(name, value, step)


class StepTimer:
    """Measures the seconds of named sections of a step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, section: str) -> Iterator[None]:
        """Measure the time spent within the context."""
        started = self._now()
        yield
        self.seconds[section] = round(self._now() - started, 6)

    def _now(self) -> float:
        # GPU kernels run asynchronously.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def write_json(path: Path, value: object) -> None:
    """Write the metrics of a result as JSON with sorted keys."""
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def write_json_lines(path: Path, lines: Iterable[Mapping[str, Any]], mode: str = "w") -> None:
    """Write a result of one JSON object on each line."""
    with path.open(mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
