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
EVALUATED = "eval_"


class MetricsLogger(contextlib.ExitStack):
    """Writes metrics.jsonl and responses.jsonl into the result, and metrics to TensorBoard.

    The lines contain no times, so that two builds give the same bytes. A resumed run appends to the
    existing lines. Only the first process writes.

    last_step: The step after which the run resumes; 0 for a new one.
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
        name = f"{job.spec['rule']} {job.spec['name']}"
        self.progress = ProgressLines(name, "steps", num_steps, last_step, next_line=0)
        self.throughput = ""
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
        """Log the metrics of a step.

        Args:
            step: Number of the step.
            metrics: By name; None stands for one that this step does not have.
            evaluation: Metrics on held-out rows as `eval_NAME`, if there are any.
            shown: Names of the metrics in lines about the progress.
            rows: Rows of the step, for the error message.

        Raises:
            InputError: A metric is not finite.
        """
        found = {**(metrics or {}), **(evaluation or {})}
        values = {name: value for name, value in found.items() if value is not None}
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
            held_out = [f"{k.removeprefix(EVALUATED)} {v:.4g}" for k, v in evaluation.items()]
            self.progress.print(step, f"on held-out rows: {', '.join(held_out)}")
        elif self.progress.is_due(step):
            self._print_progress(step, shown, values)

    def log_responses(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append responses of a step, with any keys, to responses.jsonl."""
        if rank() == 0 and lines:
            with self.responses.open("a") as file:
                file.writelines(json.dumps({"step": step, **line}) + "\n" for line in lines)

    def log_times(self, step: int, seconds: Mapping[str, float], tokens: int) -> None:
        """Append the times of a step to times.jsonl in the log folder.

        Args:
            step: Number of the step.
            seconds: Seconds by name of the timed section.
            tokens: Tokens that the step processed, for the throughput.
        """
        if rank() > 0:
            return
        tokens_per_second = tokens / sum(seconds.values())
        values = {**seconds, "tokens": tokens, "tokens_per_second": tokens_per_second}
        self.throughput = f"{tokens_per_second:,.0f} tokens/s"
        with self.times.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        self._add_scalars(step, {f"times/{name}": value for name, value in values.items()})

    def _print_progress(self, step: int, shown: Iterable[str], values: Mapping[str, float]) -> None:
        """Print a line with metrics, the throughput of the last timed step and memory."""
        names = {name: name.rpartition("/")[2] for name in shown} | SHOWN
        details = [f"{label} {values[name]:.4g}" for name, label in names.items() if name in values]
        if self.throughput:
            details.append(self.throughput)
        if torch.cuda.is_available():
            megabytes, where = torch.cuda.max_memory_allocated() / (1 << 20), "GPU memory"
        else:
            megabytes, where = peak_memory_mb(), "memory"
        self.progress.print(step, *details, f"{megabytes / 1024:.1f} GiB of {where}")

    def _add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.tensorboard.add_scalar(name, value, step)


class StepTimer:
    """Measures named sections of a step.

    Attributes:
        seconds: Seconds of each section in the last step.
    """

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


def write_json_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a result of one JSON object on each line."""
    with path.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
