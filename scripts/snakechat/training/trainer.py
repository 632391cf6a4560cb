"""What all trainings have in common: processes and placement, the model, the loop of steps.

A trainer computes and updates in each step. A run that is interrupted after the updates of a step
evaluates and logs this step when it resumes. A process that runs out of memory notes the next rung
(snakechat/training/rungs.py) and ends: the launcher starts all processes again.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful

from snakechat.config.settings import TrainingSettings
from snakechat.data.ragged_arrays import read_statistics
from snakechat.data.tokenizers import load_training_tokenizer
from snakechat.modeling.batching import Examples, MicroBatch, training_batches
from snakechat.modeling.loading import select_trained
from snakechat.modeling.model_check import MAX_FP32_WEIGHTS, check_model
from snakechat.modeling.models import can_compile, choose_device, compile_layers, model_size
from snakechat.modeling.saving import count_stored_weights, save_model
from snakechat.training.checkpointing import Checkpointer, checkpoints, saved_values
from snakechat.training.engine import Engine
from snakechat.training.metrics import (
    Evaluations,
    MetricsLogger,
    StepTimer,
    record_changed_weights,
)
from snakechat.training.placed_models import P, init_process_group, load_model, make_engine
from snakechat.training.rungs import Ladder, goes_down, is_open, reproduced_rung, without_hopeless
from snakechat.workflow.errors import is_out_of_memory
from snakechat.workflow.job import Job
from snakechat.workflow.processes import (
    Placement,
    all_reduce_max,
    all_reduce_sum,
    barrier,
    broadcast_from_first,
    rank,
)

S = TypeVar("S", bound=TrainingSettings)
# Values by name; None for a metric that a step does not have, as in an fp16 step that was skipped.
Metrics = Mapping[str, float | None]

# A model is compiled by default if it has more weights than these, and is trained for more than
# these seconds after COMPILED_AFTER steps of this run. A smaller model was compared with
# transformers in fp32 (modeling/model_check.py). Compiling takes up to a few minutes.
COMPILED_WEIGHTS, COMPILED_SECONDS, COMPILED_AFTER = MAX_FP32_WEIGHTS, 600, 2


def trainer(
    train: Callable[[Any], None], kind: type[Any] | None = None
) -> Callable[[Job[Any]], None]:
    """Return the program that calls `train` with a Training, or with another kind of it.

    If its process runs out of memory, it notes the next rung and ends.
    """

    def main(job: Job[Any]) -> None:
        training: Any = (kind or Training)(job)
        try:
            train(training)
        except Exception as error:
            if not is_out_of_memory(error) or not training.go_down():
                raise
            sys.stderr.flush()
            # Other processes may wait in a collective operation: the launcher ends them.
            os._exit(1)

    return main


class Step(NamedTuple):
    """The outcome of a step.

    shown: Names of the metrics in lines about the progress.
    tokens: Tokens that the step processed, for the throughput.
    responses: Lines of responses.jsonl, with any keys.
    """

    metrics: Metrics
    shown: Sequence[str]
    tokens: int
    responses: Sequence[Mapping[str, Any]] = ()


class Training(Generic[S]):
    """A training in one of its processes.

    Attributes:
        base: Folder of the model that is trained.
        tokenizer: The tokenizer of the tokens, which results have too.
        timer: Times the sections of a step.
        is_untried: Whether the rung has to be tried.
    """

    def __init__(self, job: Job[S]) -> None:
        self.job, self.settings, self.given = job, job.settings, job.placement
        self.base = job.inputs["actor" if "actor" in job.inputs else "model"]
        self.ladder = Ladder(job.states, job.placement, job.settings.dtype)
        self.is_untried = goes_down(job.placement) and self.ladder.state != "tried"
        self.device = init_process_group(job.placement)
        self.timer = StepTimer(self.device)
        if is_open(self.given):
            self._choose_rung()
        torch.manual_seed(job.settings.seed)
        template = read_statistics(job.inputs["tokens"], "train")["template"]
        self.tokenizer = load_training_tokenizer(self.base, template)

    # --- placement ------------------------------------------------------------------------------

    def _choose_rung(self) -> None:
        """Complete a placement that has `auto`."""
        job, ladder = self.job, self.ladder
        rungs = ladder.rungs[ladder.rungs.index(ladder.rung) :]
        if self.is_untried:
            # With adapters, few weights are trained.
            adapts = self.settings.lora_rank and self.settings.train_base == "none"
            weights = 0 if adapts or self.settings.train_only else count_stored_weights(self.base)
            memory = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 1 << 62
            smallest = -all_reduce_max(-float(memory))
            rungs = without_hopeless(rungs, self.given, weights, smallest)
        # A checkpoint has the ZeRO stage of its engines, also where the rung was forgotten.
        saved = next(saved_values(job.states), {})
        stages = [value for key, value in saved.items() if key.endswith(".zero_stage")][:1]
        rungs = [rung for rung in rungs if rung.zero_stage in stages] or rungs
        made = reproduced_rung(job.target, ladder.rungs)
        # Each process reads the same, but a file may change.
        index = broadcast_from_first(ladder.rungs.index(made or rungs[0]))
        ladder.rung = ladder.rungs[index]
        job.placement = ladder.rung.of(self.given)
        choose_device(job.placement)
        if rank() == 0 and self.given.gpus_per_node:
            print(f"placement: {ladder.rung}", flush=True)

    def _try(self, engines: Iterable[Engine[Any]], step: Callable[[], object]) -> None:
        """Take a step that changes nothing, or that runs out of memory."""
        self._note("trying")
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), contextlib.ExitStack() as trials:
            for engine in engines:
                trials.enter_context(engine.trial())
            step()
        self._note("tried")

    def _note(self, state: Literal["trying", "tried"]) -> None:
        """Note the state of the rung, once all processes are here."""
        barrier()
        if rank() == 0:
            self.ladder.note(state)
        barrier()

    def go_down(self) -> bool:
        """Note the next rung, after this process ran out of memory; return whether there is one."""
        failed = self.ladder.rung
        # A checkpoint has a ZeRO stage.
        stage = failed.zero_stage if checkpoints(self.job.states) else None
        if not goes_down(self.given) or not self.ladder.go_down(stage):
            return False
        print(f"out of memory with {failed}: starting again with {self.ladder.rung}", flush=True)
        return True

    # --- models ---------------------------------------------------------------------------------

    def load_engine(
        self,
        wrapper: type[P],
        folder: Path,
        examples: Examples,
        learning_rate: float,
        num_steps: int,
        longest: int,
        settings: TrainingSettings | None = None,
        placement: Placement | None = None,
        new_head: bool = False,
        samples: bool = False,
    ) -> Engine[P]:
        """Load a model that is trained, with its adapters; return its engine."""
        settings, placement = settings or self.settings, placement or self.job.placement
        dtype, deferred = settings.dtype, placement.is_partitioned(settings.dtype)
        model = load_model(wrapper, folder, dtype, self.tokenizer, deferred, longest, new_head)
        module = wrapper(select_trained(model, settings))
        engine = make_engine(module, settings, learning_rate, num_steps, placement)
        check_model(module, examples, engine.sampling, samples)
        return engine

    def save(self, engine: Engine[Any], folder: Path) -> None:
        """Write the model of an engine, in save_dtype, into a folder for from_pretrained."""
        master = engine.master if self.settings.save_dtype == "fp32" else None
        save_model(engine.module.model, self.tokenizer, folder, engine.gathered, master)

    def load(self, wrapper: type[P], examples: Examples) -> Engine[P]:
        """Load the model that `train` trains on examples; return its engine."""
        settings = cast(Any, self.settings)
        self.batches = training_batches(len(examples), settings.global_batch_size, settings)
        engine = self.load_engine(
            wrapper,
            self.base,
            examples,
            settings.learning_rate,
            len(self.batches),
            settings.max_length,
            new_head=True,
        )
        self.engine: Engine[Any] = engine
        self.largest = examples.largest_rows(engine.module.supports_packing)
        return engine

    # --- steps ----------------------------------------------------------------------------------

    def train(
        self,
        update: Callable[[int, np.ndarray], Metrics],
        evaluate: Callable[[], Mapping[str, float]],
        num_tokens: np.ndarray,
        shown: Sequence[str],
        evaluates_first: bool = False,
    ) -> None:
        """Train the model of `load`, and save the result.

        Args:
            update: Updates the model on the rows of a step, given its number and them; returns
                metrics.
            evaluate: Returns metrics on the eval split by name.
            num_tokens: Tokens of each row, for the throughput.
            shown: Names of the metrics in lines about the progress.
        """
        engine = self.engine

        def step(number: int, rows: np.ndarray) -> Step:
            learning_rate = engine.learning_rate
            with self.timer("train"):
                metrics = update(number, rows)
            metrics = {**metrics, "learning_rate": learning_rate, **engine.metrics}
            return Step(metrics, shown, int(num_tokens[rows].sum()))

        evaluations = Evaluations(
            self.job,
            len(self.batches),
            evaluate,
            lambda folder: self.save(engine, folder),
            evaluates_first,
        )
        self.take_steps(
            self.batches, step, lambda: update(1, self.largest), evaluations, {"model": engine}
        )

    def take_steps(
        self,
        batches: Sequence[np.ndarray],
        step: Callable[[int, np.ndarray], Step],
        try_step: Callable[[], object],
        evaluations: Evaluations,
        components: Mapping[str, Stateful],
    ) -> None:
        """Take the steps of a run, or those that remain, and save the result.

        Until the end, a signal saves the state and ends the run.

        Args:
            batches: The rows of each step.
            step: Computes and updates on rows, given the number of the step and them.
            try_step: Computes and updates as in a step, on the largest micro-batch.
            components: All state that a step changes, by name; the engine of the saved model first.
        """
        job, engines = self.job, {k: v for k, v in components.items() if isinstance(v, Engine)}
        models = {name: engine.module.model for name, engine in engines.items()}
        job.record["models"] = {name: model_size(model) for name, model in models.items()}
        checkpointer = Checkpointer(job, evaluations=evaluations, **components)
        last_step, outcome = checkpointer.step, checkpointer.outcome
        with checkpointer, MetricsLogger(job, len(batches), last_step) as logger:
            if not last_step and self.is_untried:
                self._try(engines.values(), try_step)
            # The interrupted run may not have evaluated and logged its last step.
            if last_step or evaluations.is_due(0):
                logger.log(last_step, **outcome, evaluation=evaluations.after_step(last_step))
            for number, rows in checkpointer.steps(batches):
                if evaluations.should_stop:
                    break
                done = step(number, rows)
                logger.log_step(number, self.timer.seconds, done.tokens, done.responses)
                outcome = {
                    "metrics": done.metrics,
                    "shown": done.shown,
                    "rows": sorted(rows.tolist()),
                }
                checkpointer.keep(number, outcome)
                logger.log(number, **outcome, evaluation=evaluations.after_step(number))
                if number - last_step == COMPILED_AFTER:
                    self._compile(engines.values(), len(batches) - number)
            evaluations.save_result()
            if rank() == 0:
                record_changed_weights(job, next(iter(models.values())), self.base)

    def _compile(self, engines: Iterable[Engine[Any]], steps_left: int) -> None:
        """Compile the layers of models if the steps left take long, by the last step's time."""
        placement = self.job.placement
        # Stage 3 runs no compiled layers.
        models = [engine.module.model for engine in engines if engine.stage < 3]
        models = [model for model in models if model_size(model)["weights"] > COMPILED_WEIGHTS]
        seconds = steps_left * sum(self.timer.seconds.values())
        is_worth_it = (
            placement.compile is None
            and placement.gpus_per_node > 0
            and not self.job.spec.get("deterministic")
            and bool(models)
            and seconds > COMPILED_SECONDS
            and can_compile()
        )
        if not broadcast_from_first(is_worth_it):
            return
        if rank() == 0:
            print(f"compile: true: the {steps_left} steps left take {seconds / 60:.0f} minutes")
        for model in models:
            compile_layers(model)
        self.job.placement = replace(placement, compile=True)
        choose_device(self.job.placement)


def text_gradients(
    engine: Engine[Any],
    micro_batches: Iterable[MicroBatch],
    num_tokens: int,
    coefficient: float = 1.0,
) -> float:
    """Accumulate the last gradients of a step, of coefficient * language modeling loss.

    Returns the loss: the mean of -log p(token) over the num_tokens target tokens of all processes.
    """
    loss_sum: Any = 0.0
    for micro_batch in micro_batches:
        share = micro_batch.counted / num_tokens
        loss = -share * engine(micro_batch.batch, return_sum=True)
        engine.backward(coefficient * loss, micro_batch.is_last)
        loss_sum = loss_sum + loss.detach()
    return all_reduce_sum(loss_sum).item()
