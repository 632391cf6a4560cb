"""The placement of a training where it has `auto`: a ladder of rungs, which are tried.

A rung is a ZeRO stage, whether activations are checkpointed, and micro_batch_tokens. On GPUs, a
training tries a step of its largest micro-batch before its first one (trainer.py). A process that
runs out of memory, then or later, notes the next rung in the folder of its checkpoints and ends;
the launcher (scripts/launch.py) starts all processes again. A process that the system kills while
it tries a rung notes nothing: the launcher does it. A run that resumes keeps its rung.

Standard library only: the launcher imports this module.
"""

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from snakechat.workflow.manifest import REPRODUCED, read_run_record, write_atomically
from snakechat.workflow.processes import SERIAL, Placement, changed_values, stage_used

AUTO = "auto"
FILE = "rung.json"
# Values of micro_batch_tokens in the order in which they are tried: smaller ones before activations
# are checkpointed or more is partitioned.
MICRO_BATCH_TOKENS = (SERIAL.micro_batch_tokens, 4096, 2048)
# ZeRO stages with and without activation_checkpointing, the fastest first. Checkpointing computes
# each forward pass a second time; stage 3 gathers all weights in each pass, and to sample.
CHOICES = [
    (stage, recomputes)
    for stages in ((0, 1, 2), (3,))
    for recomputes in (False, True)
    for stage in stages
]
# Largest fraction of a GPU's memory that the whole weights of a model may take while it samples.
MAX_WHOLE_WEIGHTS = 1 / 3


class Rung(NamedTuple):
    """What `auto` stands for; keys without `auto` have the value of the placement."""

    zero_stage: int
    activation_checkpointing: bool
    micro_batch_tokens: int

    def __str__(self) -> str:
        return ", ".join(f"{key}: {str(value).lower()}" for key, value in self._asdict().items())

    def of(self, placement: Placement) -> Placement:
        """Return a placement with the values of this rung."""
        return replace(placement, **self._asdict())


class Ladder:
    """The rungs of a training, and the file among its checkpoints that says which one it is on.

    Attributes:
        rungs: In the order in which they are tried; one if the placement has no `auto`.
        number: How many times the training has gone down.
        state: Whether a run has taken a step on the current rung ("tried"), or has begun to and has
            not said how that ended ("trying").
    """

    def __init__(self, states: Path, placement: Placement, dtype: str) -> None:
        self.file, self.rungs = states / FILE, possible_rungs(placement, dtype)
        # With another placement, all rungs are open again.
        self.identity: dict[str, Any] = json.loads(json.dumps(changed_values(placement)))
        self.read()

    def read(self) -> None:
        """Read what the file says, if it is about this placement."""
        self.rung, self.number, self.state = self.rungs[0], 0, "open"
        noted = _read(self.file)
        if noted.get("placement") == self.identity and Rung(*noted["rung"]) in self.rungs:
            self.rung, self.number = Rung(*noted["rung"]), noted["number"]
            self.state = noted["state"]

    def note(self, state: Literal["open", "trying", "tried"]) -> None:
        """Write the file, with another state of the current rung."""
        self.state = state
        values = {"placement": self.identity, "rung": self.rung, "number": self.number}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, json.dumps(values | {"state": state}))

    def go_down(self, zero_stage: int | None = None) -> bool:
        """Note the next rung, unless another process has; return False if there is none.

        zero_stage: The stage of the last checkpoint, which has to stay.
        """
        failed, number = self.rung, self.number
        self.read()
        if self.number > number:
            return True
        following = self.rungs[self.rungs.index(failed) + 1 :]
        if zero_stage is not None:
            following = [rung for rung in following if rung.zero_stage == zero_stage]
        # Another process, for which there was none, has removed the file.
        if self.number < number or not following:
            self.file.unlink(missing_ok=True)
            return False
        self.rung, self.number = following[0], number + 1
        self.note("open")
        return True


def noted_number(states: Path) -> int:
    """Return how many times the training with this folder of checkpoints has gone down."""
    return int(_read(states / FILE).get("number", 0))


def _read(file: Path) -> dict[str, Any]:
    """Return what a file says; nothing if it is missing or damaged."""
    with suppress(OSError, ValueError):
        return dict(json.loads(file.read_text()))
    return {}


def is_open(placement: Placement) -> bool:
    """Return whether a placement has `auto` for a key."""
    return any(getattr(placement, key) == AUTO for key in Rung._fields)


def goes_down(placement: Placement) -> bool:
    """Return whether a training may go down the ladder; a CPU takes the first rung."""
    return is_open(placement) and placement.gpus_per_node > 0


def possible_rungs(placement: Placement, dtype: str) -> list[Rung]:
    """Return the rungs that a placement allows, in the order in which they are tried."""
    stages = [stage for stage in range(4) if stage_used(stage, dtype) == stage]
    if placement.offload != "none":
        # DeepSpeed offloads only what ZeRO partitions.
        stages = [stage for stage in stages if stage > 0]
    if placement.compile:
        # Stage 3 runs no compiled layers.
        stages.remove(3)
    if placement.num_processes == 1:
        # There is nothing to partition.
        del stages[1:]
    # Values of the type that the placement declares, or `auto`.
    stage, recomputes, number = (getattr(placement, key) for key in Rung._fields)
    tokens = MICRO_BATCH_TOKENS if number == AUTO else (number,)
    rungs = [
        Rung(*choice, number)
        for choice in CHOICES
        if choice[0] in (stages if stage == AUTO else [stage]) and recomputes in (AUTO, choice[1])
        for number in tokens
    ]
    return rungs if goes_down(placement) else rungs[:1]


def without_hopeless(
    rungs: list[Rung], placement: Placement, trained: int, gpu_memory: float
) -> list[Rung]:
    """Return the rungs on which weights, gradients and optimizer state alone fit into a GPU.

    The last of the rungs, from the current one on, always stays.

    trained: Number of weights that are trained.
    gpu_memory: Bytes of the smallest GPU.
    """
    if placement.offload != "none":
        return rungs
    processes = placement.num_processes
    limit = gpu_memory / max(trained, 1)
    return [r for r in rungs if training_bytes(r.zero_stage, processes) <= limit] or rungs[-1:]


def training_bytes(stage: int, processes: int, dtype: str = "fp32") -> float:
    """Return the bytes of a process per trained weight.

    Rajbhandari et al. 2020 (ZeRO), section 3.1: 2 bytes of a weight and 2 of its gradient in 16
    bits, 12 of its fp32 value and the two moments of Adam. From stage 1 on, the processes divide
    the last 12; from stage 2 on the gradients too; at stage 3 all. In fp32 it is as much. Stage 0
    takes 2 more in 16 bits: Engine accumulates gradients in fp32.
    """
    if stage == 0:
        return 16 if dtype == "fp32" else 18
    whole = {1: 4, 2: 2, 3: 0}[stage]
    return whole + (16 - whole) / processes


def samples_whole(weight_bytes: float, gpu_memory: float) -> bool:
    """Return whether each process gathers the weights of a partitioned model to sample.

    Otherwise the processes gather one layer at a time, for each token: this takes longer, and no
    memory. The results are the same. On CPUs, gpu_memory is 0.
    """
    return weight_bytes <= MAX_WHOLE_WEIGHTS * gpu_memory


def reproduced_rung(target: Path, rungs: list[Rung]) -> Rung | None:
    """Return the rung on which a result (output/...) was made that this build makes again."""
    folder = os.environ.get(REPRODUCED)
    record = read_run_record(Path(folder, *target.parts[1:])) if folder else None
    if not record:
        return None
    used = record["placement"].items()
    return next((rung for rung in rungs if rung._asdict().items() <= used), None)
