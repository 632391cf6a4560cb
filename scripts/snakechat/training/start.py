"""What all trainings begin with: their processes, the placement that `auto` stands for, the model.

The placement is tried before the first step, see snakechat/training/rungs.py.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from snakechat.config.training_settings import TrainingSettings
from snakechat.data.tokenizers import load_training_tokenizer
from snakechat.modeling.batching import Examples
from snakechat.modeling.deferred_weights import count_stored_weights
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.loading import load_causal, load_scorer
from snakechat.modeling.lora import add_lora
from snakechat.modeling.model_check import check_model
from snakechat.modeling.models import check_sequence_length, model_size
from snakechat.modeling.saving import save_model
from snakechat.training.changed_weights import record_changed_weights, saved_values
from snakechat.training.checkpointing import Generators, saved_zero_stage
from snakechat.training.engine import Engine, make_engine
from snakechat.training.loop import TrainingLoop
from snakechat.training.process_group import init_process_group
from snakechat.training.rungs import (
    Ladder,
    Rung,
    goes_down,
    is_open,
    reproduced_rung,
    without_hopeless,
)
from snakechat.training.zero_stages import is_partitioned
from snakechat.workflow.distributed import all_reduce_max, barrier, broadcast_from_first, rank
from snakechat.workflow.errors import is_out_of_memory
from snakechat.workflow.job import Job

M = TypeVar("M", Policy, Scorer)


# --- placement ----------------------------------------------------------------------------------


def on_rungs(main: Callable[[Job[Any]], None]) -> Callable[[Job[Any]], None]:
    """Have a training that runs out of memory note the next rung, and end.

    The launcher then starts its processes again. Without a next rung, the error remains.
    """

    @functools.wraps(main)
    def run(job: Job[Any]) -> None:
        ladder = Ladder(job.states, job.placement, job.settings.dtype)
        try:
            main(job)
        except Exception as error:
            if not (goes_down(ladder.placement) and is_out_of_memory(error)):
                raise
            failed, number = Rung.used(job.placement), ladder.number
            ladder.read()
            if ladder.number <= number:
                if ladder.number < number or not ladder.step_down(saved_zero_stage(job.states)):
                    raise
                print(f"out of memory with {failed}: starting again with {ladder.rung}", flush=True)
            # Otherwise, another process has noted the next rung.
            sys.stderr.flush()
            # Other processes may wait in a collective operation: the launcher ends them.
            os._exit(1)

    return run


def start_training(job: Job[Any]) -> tuple[torch.device, "Trial"]:
    """Join the process group, and complete the placement of a training.

    Returns:
        The device of this process, and the trial of the placement.
    """
    device = init_process_group(job.placement)
    trial = Trial(job)
    torch.manual_seed(job.settings.seed)
    return device, trial


class Trial:
    """Completes the placement of a training that has `auto`, and tries it."""

    def __init__(self, job: Job[Any]) -> None:
        placement = job.placement
        self.ladder = ladder = Ladder(job.states, placement, job.settings.dtype)
        self.is_needed = goes_down(placement) and not ladder.is_tried
        if not is_open(placement):
            return
        rungs = ladder.rungs[ladder.rungs.index(ladder.rung) :]
        if self.is_needed:
            rungs = without_hopeless(rungs, placement, _trained_weights(job), _gpu_memory())
        if stage := saved_zero_stage(job.states):
            rungs = [rung for rung in rungs if rung.zero_stage == stage] or rungs
        made = reproduced_rung(job.target, ladder.rungs)
        # Each process reads the same, but a file may change.
        index = broadcast_from_first(ladder.rungs.index(made or rungs[0]))
        ladder.rung = ladder.rungs[index]
        job.placement = ladder.rung.of(placement)
        if rank() == 0 and placement.gpus_per_node:
            print(f"placement: {ladder.rung}", flush=True)

    def run(
        self, loop: TrainingLoop, engines: Sequence[Engine], step: Callable[[], object]
    ) -> None:
        """Take a step that changes nothing, unless an earlier run did, or there is no choice.

        Args:
            loop: The loop that has not begun.
            engines: The engines that it uses.
            step: Computes and updates as in a step, on the largest micro-batch.

        Raises:
            OutOfMemoryError: A process has too little memory.
        """
        if not (self.is_needed and loop.is_new):
            return
        self._note(is_tried=False)
        generators = Generators()
        state = generators.state_dict()
        with contextlib.ExitStack() as trials:
            for engine in engines:
                trials.enter_context(engine.trial())
            step()
        generators.load_state_dict(state)
        self._note(is_tried=True)

    def _note(self, is_tried: bool) -> None:
        """Note, once all processes are here, that the trial begins or that it has succeeded."""
        barrier()
        if rank() == 0:
            ladder = self.ladder
            ladder.write(ladder.rung, ladder.number, is_tried=is_tried, is_trying=not is_tried)
        barrier()


def _trained_weights(job: Job[Any]) -> int:
    """Return the number of weights that a training updates, 0 with adapters, which are few."""
    settings: TrainingSettings = job.settings
    if settings.lora_rank and settings.train_base == "none":
        return 0
    return count_stored_weights(job.inputs["actor" if "actor" in job.inputs else "model"])


def _gpu_memory() -> float:
    """Return the bytes of the smallest GPU of all processes."""
    memory = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 1 << 62
    return -all_reduce_max(-float(memory))


# --- the model ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedModel(Generic[M]):
    """The model of SFT, of a reward model or of DPO, and the engine that trains it."""

    job: Job[Any]
    tokenizer: PreTrainedTokenizerBase
    module: M
    engine: Engine

    def save(self, folder: Path) -> None:
        """Write the model into a folder that from_pretrained loads."""
        master = saved_values(self.engine, self.job.settings)
        save_model(self.module.model, self.tokenizer, folder, self.engine.gathered, master)

    def record_changed_weights(self) -> None:
        """Record which share of the trained weights is saved with a new value."""
        record_changed_weights(self.job, self.module.model, self.job.inputs["model"])


def load_policy(job: Job[Any], examples: Examples, num_steps: int) -> TrainedModel[Policy]:
    """Load the language model that a job trains; see _trained_model."""
    settings, deferred = job.settings, is_partitioned(job.placement, job.settings.dtype)
    tokenizer = load_training_tokenizer(job.inputs["model"], settings.template)
    model = load_causal(job.inputs["model"], settings.dtype, tokenizer, deferred)
    return _trained_model(job, tokenizer, model, Policy, examples, num_steps)


def load_reward_model(job: Job[Any], examples: Examples, num_steps: int) -> TrainedModel[Scorer]:
    """Load a language model with a new score head, which a job trains; see _trained_model."""
    settings, deferred = job.settings, is_partitioned(job.placement, job.settings.dtype)
    tokenizer = load_training_tokenizer(job.inputs["model"], settings.template)
    model = load_scorer(job.inputs["model"], settings.dtype, tokenizer, True, deferred)
    return _trained_model(job, tokenizer, model, Scorer, examples, num_steps)


def _trained_model(
    job: Job[Any],
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    wrapper: type[M],
    examples: Examples,
    num_steps: int,
) -> TrainedModel[M]:
    """Add adapters to a model, create its engine, and compare its passes with transformers'.

    Args:
        examples: Rows of the training.
        num_steps: Number of optimizer steps.

    Raises:
        InputError: The model is not supported, or has too few positions.
    """
    settings = job.settings
    check_sequence_length(model, settings.max_length)
    if settings.lora_rank:
        model = add_lora(model, settings.lora_rank, settings.lora_alpha, settings.train_base)
    job.record["models"] = {"model": model_size(model)}
    module = wrapper(model)
    engine = make_engine(module, settings, settings.learning_rate, num_steps, job.placement)
    check_model(module, examples, engine.sampling)
    return TrainedModel(job, tokenizer, module, engine)
