"""The loop of a training: steps, metrics, evaluations and checkpoints.

A trainer computes and updates in each step, and calls `end_step`. From then on, a run that is
interrupted evaluates and logs this step when it resumes.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from snakechat.modeling.acceleration import can_compile, compile_layers
from snakechat.modeling.model_check import MAX_FP32_WEIGHTS
from snakechat.modeling.models import choose_device, model_size
from snakechat.training.checkpointing import Checkpointer, Stateful
from snakechat.training.engine import Engine
from snakechat.training.evaluations import Evaluations
from snakechat.training.metric_logs import MetricsLogger, StepTimer
from snakechat.workflow.distributed import broadcast_from_first, rank
from snakechat.workflow.job import Job

# A model is compiled by default if it has more weights than these, and is trained for more than
# these seconds after COMPILED_AFTER steps of this run. A smaller model was compared with
# transformers in fp32 (modeling/model_check.py). Compiling takes up to a few minutes.
COMPILED_WEIGHTS, COMPILED_SECONDS, COMPILED_AFTER = MAX_FP32_WEIGHTS, 600, 2


class TrainingLoop:
    """Iterates over the steps of a run, which it resumes, evaluates and logs.

    Within its context, a signal saves the state and ends the run.

    Args:
        job: The training job.
        batches: The rows of each step.
        evaluations: When and how the model is evaluated.
        device: The device of this process.
        components: All state that a step changes, by name; engines among them.

    Attributes:
        timer: Times the sections of a step.
    """

    def __init__(
        self,
        job: Job[Any],
        batches: Sequence[np.ndarray],
        evaluations: Evaluations,
        device: torch.device,
        **components: Stateful,
    ) -> None:
        self.job, self.batches, self.evaluations = job, batches, evaluations
        self.timer, self.contexts = StepTimer(device), contextlib.ExitStack()
        self.checkpointer = Checkpointer(job, evaluations=evaluations, **components)
        self.engines = [each for each in components.values() if isinstance(each, Engine)]

    def __enter__(self) -> Self:
        self.contexts.enter_context(self.checkpointer)
        self.logger = self.contexts.enter_context(MetricsLogger(self.job, len(self.batches)))
        return self

    def __exit__(self, *_: object) -> None:
        self.contexts.close()

    @property
    def is_new(self) -> bool:
        """Whether no earlier run has taken steps."""
        return self.checkpointer.last_step == 0

    def evaluate_initial_model(self) -> None:
        """Evaluate and log the model before training, unless the run resumes."""
        if self.is_new:
            self.logger.log(0, [], (), **self.evaluations.run(0))

    def steps(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (step, rows) of the remaining steps, until the last one or the last evaluation."""
        checkpointer = self.checkpointer
        if checkpointer.unfinished:
            self._finish_step(**checkpointer.unfinished)
            checkpointer.finish_step(checkpointer.last_step)
        for step, rows in checkpointer.steps(self.batches):
            if self.evaluations.should_stop:
                return
            yield step, rows
            if step - checkpointer.last_step == COMPILED_AFTER:
                self._compile(len(self.batches) - step)

    def end_step(
        self,
        step: int,
        rows: np.ndarray,
        shown: Sequence[str],
        metrics: Mapping[str, float | None],
        tokens: int,
        counts: Mapping[str, int],
    ) -> None:
        """Evaluate the model if it is due, and log the step.

        Args:
            step: Number of the step, after whose updates this is called.
            rows: Its rows, for the error message.
            shown: Names of the metrics in lines about the progress.
            metrics: Values by name; None for a metric that this step does not have.
            tokens: Tokens that the step processed, for the throughput.
            counts: Further counts for times.jsonl, such as rows.

        Raises:
            InputError: A metric is not finite.
        """
        unfinished: dict[str, Any] = {
            "step": step,
            "rows": sorted(map(int, rows)),
            "shown": list(shown),
            "metrics": dict(metrics),
            "seconds": dict(self.timer.seconds),
            "tokens": tokens,
            "counts": dict(counts),
        }
        self.checkpointer.keep_state(step, unfinished)
        self._finish_step(**unfinished)

    def _finish_step(
        self,
        step: int,
        rows: list[int],
        shown: list[str],
        metrics: dict[str, float | None],
        seconds: dict[str, float],
        tokens: int,
        counts: dict[str, int],
    ) -> None:
        """Evaluate and log a step whose updates are done."""
        eval_metrics = self.evaluations.after_step(step)
        # A state is saved before both of these or after both.
        self.checkpointer.lock.begin()
        self.logger.log(step, shown, rows, **metrics, **eval_metrics)
        self.logger.log_times(step, seconds, tokens, **counts)
        self.checkpointer.keep_state(step)

    def _compile(self, steps_left: int) -> None:
        """Compile the layers of models whose training takes long enough, by the last step's time.

        steps_left: Number of the steps that follow.
        """
        placement = self.job.placement
        if placement.compile is not None or not placement.gpus_per_node:
            return
        # Stage 3 runs no compiled layers.
        models = [
            cast(PreTrainedModel, engine.module.model)
            for engine in self.engines
            if engine.stage < 3
        ]
        models = [model for model in models if model_size(model)["weights"] > COMPILED_WEIGHTS]
        seconds = steps_left * sum(self.timer.seconds.values())
        is_worth_it = seconds > COMPILED_SECONDS and can_compile()
        if self.job.spec.get("deterministic") or not broadcast_from_first(is_worth_it):
            return
        if rank() == 0 and models:
            print(f"compile: true: the {steps_left} steps left take {seconds / 60:.0f} minutes")
        for model in models:
            compile_layers(model)
        if models:
            self.job.placement = replace(placement, compile=True)
            choose_device(self.job.placement)
