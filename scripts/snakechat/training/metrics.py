"""Metrics of a training: its evaluations, the best model, changed weights, and logs."""

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils.tensorboard import SummaryWriter
from transformers import PreTrainedModel

from snakechat.modeling.models import DTYPES
from snakechat.modeling.saving import saved_weights, weight_files, weights_in_files
from snakechat.training.checkpointing import Attributes, saved_values
from snakechat.workflow.errors import InputError, ProgressLines, warn
from snakechat.workflow.job import Job, peak_memory_mb, write_json_lines
from snakechat.workflow.processes import barrier, broadcast_from_first, rank

# Adam moves all weights by about the same distance, the sum of the learning rates of the steps at
# most. In 16 bits, a weight takes its new value only if the distance is more than half of that to
# its neighbours, and otherwise loses its whole update. If a share c of the weights changes, the
# others hold 1 - c of the squared length of the update: below one half, rounding discards more of
# the update than it keeps.
MIN_CHANGED = 0.5
# Metrics that lines about the progress show where a step has them: their names there.
SHOWN = {
    "learning_rate": "learning rate",
    "policy/learning_rate": "learning rate",
    "skipped_steps": "skipped",
    "policy/skipped_steps": "skipped",
}


# --- evaluations ----------------------------------------------------------------------------------


class Evaluations(Attributes):
    """Evaluates a model every `eval_steps`, tracks the best one and saves the result.

    With `save_strategy: best`, copies of the best model lie next to the checkpoints of the run. A
    copy is deleted when no remaining checkpoint refers to it. With `keep_steps`, copies of the
    model are kept there until the end: a resumed run starts with an empty result folder.

    Args:
        num_steps: Optimizer steps of the run, unless it stops early.
        evaluate: Returns metrics on the eval split by name.
        save: Writes the model into a folder.
        evaluates_first: Evaluate the model before training even without eval_steps.
        best_metric: Name of the metric whose highest value is of the best model. By default, it is
            the lowest `loss`.

    Attributes:
        best_step, best_value: Step and metric of the best evaluation.
        since_best: Number of evaluations since the best one.
    """

    saved = ("best_step", "best_value", "since_best")

    def __init__(
        self,
        job: Job[Any],
        num_steps: int,
        evaluate: Callable[[], Mapping[str, float]],
        save: Callable[[Path], None],
        evaluates_first: bool = False,
        best_metric: str | None = None,
    ) -> None:
        self.job, self.num_steps, self.evaluate, self.save = job, num_steps, evaluate, save
        self.settings, self.keeps_best = job.settings, job.settings.save_strategy == "best"
        self.evaluates_first, self.best_metric = evaluates_first, best_metric
        self.best_step, self.since_best = 0, 0
        self.best_value: float | None = None

    def is_due(self, step: int) -> bool:
        """Return whether the model is evaluated after a step; step 0 is before training."""
        interval = self.settings.eval_steps
        is_due = interval > 0 and (step % interval == 0 or step == self.num_steps)
        return is_due or (step == 0 and self.evaluates_first)

    def after_step(self, step: int) -> dict[str, float]:
        """Keep a copy of the model and evaluate it, if they are due; return metrics as `eval_NAME`.

        Copies the model if it is the best one so far. The model before training (step 0) never is.
        """
        keep_steps = self.settings.keep_steps
        if step and keep_steps and step % keep_steps == 0:
            self._copy_model(f"step-{step}")
        if not self.is_due(step):
            return {}
        metrics = self.evaluate()
        if step:
            self._update(step, metrics[self.best_metric or "loss"])
        return {f"eval_{name}": value for name, value in metrics.items()}

    @property
    def should_stop(self) -> bool:
        """Whether the last early_stopping_patience evaluations have found no better model."""
        return 0 < self.settings.early_stopping_patience <= self.since_best

    def save_result(self) -> None:
        """Write the model, or the best one, into the result, and kept ones as subfolders step-N."""
        states, result = self.job.states, self.job.result
        if not self.keeps_best:
            self.save(result)
        if rank() > 0:
            return
        if self.keeps_best:
            shutil.copytree(states / f"best-{self.best_step}", result, dirs_exist_ok=True)
            self.job.facts["saved_step"] = self.best_step
            print(f"saved the model of step {self.best_step}, the best on held-out rows")
        for copy in states.glob("step-*"):
            shutil.copytree(copy, result / copy.name)

    def _update(self, step: int, value: float) -> None:
        self.since_best += 1
        # A named metric is better if it is higher, a loss if it is lower.
        sign, best = 1 if self.best_metric else -1, self.best_value
        is_best = math.isfinite(value) if best is None else sign * value > sign * best
        # Rounding may differ between processes, which decide together.
        if not broadcast_from_first(is_best):
            return
        if self.keeps_best:
            self._copy_model(f"best-{step}")
            saved = {values["evaluations.best_step"] for values in saved_values(self.job.states)}
            for copy in self.job.states.glob("best-*") if rank() == 0 else ():
                # Neither this run nor a checkpoint refers to others.
                if copy.name not in {f"best-{each}" for each in {step, self.best_step, *saved}}:
                    shutil.rmtree(copy)
        self.best_step, self.best_value, self.since_best = step, value, 0

    def _copy_model(self, name: str) -> None:
        """Write the model into a folder next to the checkpoints."""
        temporary, target = self.job.states / ".copy", self.job.states / name
        if rank() == 0:
            # Left by a killed run.
            shutil.rmtree(temporary, ignore_errors=True)
        self.save(temporary)
        # All wait here for the first process, and not within the next step, where a signal saves no
        # state.
        barrier()
        if rank() == 0:
            # A run that resumed from an earlier step makes the same copy again.
            shutil.rmtree(target, ignore_errors=True)
            temporary.replace(target)


def record_changed_weights(job: Job[Any], model: PreTrainedModel, base: Path) -> None:
    """Record in job.facts, and print, which share of the trained weights is saved with a new value.

    Facts: saved_step, changed_weights, and unchanged_because if few weights changed: learning_rate
    (0 in all steps until the saved one) or rounding. Reads the files of both models, the result and
    the base that the training started from. Only the first process calls it.
    """
    dtype, facts = job.settings.dtype, job.facts
    steps = [json.loads(line) for line in (job.result / "metrics.jsonl").read_text().splitlines()]
    saved_step = facts.setdefault("saved_step", steps[-1]["step"])
    share = changed_share(model, base, job.result, dtype)
    if share is None:
        return
    facts["changed_weights"] = share
    print(f"{share:.1%} of the trained weights differ from {base}")
    names = "learning_rate", "policy/learning_rate"
    if not any(line.get(name) for line in steps if line["step"] <= saved_step for name in names):
        facts["unchanged_because"] = "learning_rate"
        warn(
            f"the saved model is from step {saved_step}, and the learning rate was 0 until then:"
            " train more steps, or set fewer warmup_steps"
        )
    elif share < MIN_CHANGED and job.settings.save_dtype is None and dtype != "fp32":
        facts["unchanged_because"] = "rounding"
        warn(
            f"{share:.1%} of the trained weights have changed in {dtype}, expected at least"
            f" {MIN_CHANGED:.0%}: rounding has discarded most of the training: set save_dtype:"
            " fp32, or train longer or with a larger learning rate"
        )


def changed_share(model: PreTrainedModel, base: Path, saved: Path, dtype: str) -> float | None:
    """Return which share of the trained weights of a model, loaded from base, has changed.

    None if no trained weight has the same name and shape in the saved model.
    """
    _, sources = weights_in_files(model, saved_weights(model))
    before, after = weight_files(base), weight_files(saved)
    trained = {
        name
        for name, source in sources.items()
        if source and any(weight.requires_grad for weight in source.sources)
    }
    changed = total = 0
    for name in trained & before.keys() & after.keys():
        with safe_open(before[name], "pt") as old_file, safe_open(after[name], "pt") as new_file:
            old, new = old_file.get_tensor(name), new_file.get_tensor(name)
        if old.shape == new.shape:
            changed += int((old.to(DTYPES[dtype]).to(new.dtype) != new).sum())
            total += new.numel()
    return changed / total if total else None


# --- logs -----------------------------------------------------------------------------------------


class MetricsLogger(contextlib.ExitStack):
    """Writes metrics.jsonl and responses.jsonl into the result, and metrics to TensorBoard.

    The lines contain no times, so that two builds give the same bytes. A run that resumes after
    last_step appends to the existing lines. Only the first process writes.
    """

    def __init__(self, job: Job[Any], num_steps: int, last_step: int = 0) -> None:
        super().__init__()
        if rank() > 0:
            return
        tensorboard, times = job.log_folder / "tensorboard", job.log_folder / "times.jsonl"
        shutil.rmtree(tensorboard, ignore_errors=True)
        self.tensorboard = self.enter_context(SummaryWriter(tensorboard))
        self.responses = job.result / "responses.jsonl"
        # Written line by line, for those who watch the run.
        self.file = self.enter_context((job.result / "metrics.jsonl").open("a+", buffering=1))
        self.times = self.enter_context(times.open("a" if last_step else "w", buffering=1))
        self.file.seek(0)
        for metrics in map(json.loads, self.file):
            self._add_scalars(metrics.pop("step"), metrics)
        name, self.throughput = f"{job.spec['rule']} {job.spec['name']}", list[str]()
        self.progress = ProgressLines(name, "steps", num_steps, last_step, next_line=0)

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
        self._add_scalars(step, values)
        if evaluation:
            held_out = [f"{k.removeprefix('eval_')} {v:.4g}" for k, v in evaluation.items()]
            self.progress.print(step, f"on held-out rows: {', '.join(held_out)}")
        elif self.progress.is_due(step):
            names = {name: name.rpartition("/")[2] for name in shown} | SHOWN
            parts = [f"{names[name]} {values[name]:.4g}" for name in names if name in values]
            gigabytes, where = peak_memory_mb() / 1024, "memory"
            if torch.cuda.is_available():
                gigabytes, where = torch.cuda.max_memory_allocated() / (1 << 30), "GPU memory"
            self.progress.print(step, *parts, *self.throughput, f"{gigabytes:.1f} GiB of {where}")

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
            write_json_lines(self.responses, ({"step": step, **line} for line in responses), "a")
        tokens_per_second = tokens / sum(seconds.values())
        values = {**seconds, "tokens": tokens, "tokens_per_second": tokens_per_second}
        self.throughput = [f"{tokens_per_second:,.0f} tokens/s"]
        self.times.write(json.dumps({"step": step, **values}) + "\n")
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
