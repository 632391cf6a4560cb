"""Checkpoints, from which an interrupted training run resumes.

A checkpoint is the folder STORE/RULE/.KEY/state/STEP; KEY identifies the spec and the inputs. It
contains one folder per process, RANK-of-PROCESSES. A checkpoint appears atomically; the last two
are kept, and all are deleted when the result is published.

A checkpoint contains everything that the training loop changes. The order of rows is a function of
the seed and the step, so a run can resume under another placement.
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
from safetensors.torch import load_file, save_file

from snakechat.workflow.distributed import (
    all_reduce_max,
    barrier,
    broadcast_from_first,
    rank,
    world_size,
)
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job
from snakechat.workflow.manifest import result_files
from snakechat.workflow.placement import ZeroStage

CHECKPOINTS_KEPT = 2
# Largest fraction of the time spent on saving; checkpoints that would exceed it are skipped.
MAX_SAVING_FRACTION = 0.05

Batch = TypeVar("Batch")


class Stateful(Protocol):
    """A component of a run: its state is a dict of tensors and JSON values."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any) -> None: ...


class Checkpointer:
    """Iterates over the steps of a run and saves checkpoints.

    The components are restored from the last checkpoint, if any, when the object is created.

    Attributes:
        last_step: The last step of the restored checkpoint; 0 without a checkpoint.
    """

    def __init__(self, job: Job[Any], **components: Stateful) -> None:
        self.job = job
        self.components: dict[str, Stateful] = {**components, "generators": Generators()}
        self.next_save = 0.0
        self.gpu_record = gpu_record() if torch.cuda.is_available() else {}
        self.last_step = self._restore()
        job.record.update(
            resumed_after_step=self.last_step, steps=self.last_step, saving_seconds=0.0
        )

    def steps(self, batches: Iterable[Batch]) -> Iterator[tuple[int, Batch]]:
        """Yield (step, batch) of the remaining steps.

        Saves a checkpoint every options.save_steps steps. After SIGTERM (preemption on a cluster)
        or SIGINT (Ctrl-C) in any process, all processes finish the same step, save a checkpoint and
        exit.
        """
        seconds: list[float] = []
        with received_signals() as signals:
            for step, batch in enumerate(batches, start=1):
                if step <= self.last_step:
                    continue
                self.job.record["steps"] = step
                started = time.monotonic()
                yield step, batch
                seconds.append(time.monotonic() - started)
                self._update_record(seconds)
                stop = stop_signal(signals)
                due = step % self.job.options.save_steps == 0
                if stop or (due and broadcast_from_first(time.monotonic() >= self.next_save)):
                    self._save(step)
                    # A signal may have arrived during the save.
                    stop = stop or stop_signal(signals)
                if stop:
                    message = (
                        f"stopped by {signal.Signals(stop).name} after step {step}: run the same"
                        " command again to resume"
                    )
                    sys.exit(message if rank() == 0 else 1)

    def _update_record(self, seconds: list[float]) -> None:
        """Update the measurements of the job; after every step, as the loop may end early."""
        self.job.record["seconds_per_step"] = round(statistics.median(seconds), 6)
        if peak := torch.cuda.max_memory_allocated():
            self.job.record |= self.gpu_record
            self.job.record["peak_gpu_memory_mb"] = round(peak / 2**20)

    def _save(self, step: int) -> None:
        started = time.monotonic()
        tensors: dict[str, torch.Tensor] = {}
        values: dict[str, Any] = {"step": step}
        for name, component in self.components.items():
            for key, value in component.state_dict().items():
                (tensors if torch.is_tensor(value) else values)[f"{name}.{key}"] = value
        temporary = self.job.states / ".tmp"
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        barrier()
        own = temporary / process_folder()
        own.mkdir()
        save_file(tensors, own / "tensors.safetensors")
        (own / "values.json").write_text(json.dumps(values))
        if rank() == 0:
            for log in self.job.result.glob("*.jsonl"):
                shutil.copyfile(log, own / log.name)
        (own / "files.json").write_text(json.dumps(result_files(own)))
        barrier()
        if rank() == 0:
            os.replace(temporary, self.job.states / f"{step:08}")
            for old in checkpoints(self.job.states)[:-CHECKPOINTS_KEPT]:
                shutil.rmtree(old)
        now = time.monotonic()
        self.next_save = now + (now - started) / MAX_SAVING_FRACTION
        saving_seconds = self.job.record["saving_seconds"] + now - started
        self.job.record["saving_seconds"] = round(saving_seconds, 3)

    def _restore(self) -> int:
        """Restore the last undamaged checkpoint; return its step, or 0 without a checkpoint."""
        for folder in reversed(checkpoints(self.job.states)):
            check_num_processes(folder)
            own = folder / process_folder()
            if all_reduce_max(not is_undamaged(own)):
                if rank() == 0:
                    print(f"warning: {folder} is damaged and ignored", file=sys.stderr)
                    shutil.rmtree(folder)
                continue
            values = json.loads((own / "values.json").read_text())
            state = {**load_file(own / "tensors.safetensors"), **values}
            for name, component in self.components.items():
                prefix = f"{name}."
                component.load_state_dict(
                    {
                        key.removeprefix(prefix): state[key]
                        for key in state
                        if key.startswith(prefix)
                    }
                )
            if rank() == 0:
                for log in own.glob("*.jsonl"):
                    shutil.copyfile(log, self.job.result / log.name)
                print(f"resuming after step {values['step']}", file=sys.stderr)
            return values["step"]
        return 0


class Generators:
    """The random number generators of torch."""

    def __init__(self) -> None:
        self.generators = {"cpu": torch.default_generator}
        if torch.cuda.is_available():
            self.generators["cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state of each generator, as bytes."""
        return {name: generator.get_state() for name, generator in self.generators.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the generators of the devices that this machine has."""
        for name in state.keys() & self.generators:
            self.generators[name].set_state(state[name])


def gpu_record() -> dict[str, str]:
    """Return the GPU of this process and the versions of its software, as far as they are known."""
    versions = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    if torch.distributed.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {name: version for name, version in versions.items() if version}


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("*") if path.name.isdigit() and path.is_dir())


def saved_zero_stage(states: Path) -> ZeroStage | None:
    """Return the ZeRO stage of the first engine in the last checkpoint, None without one."""
    for folder in reversed(checkpoints(states)):
        with contextlib.suppress(OSError, ValueError):
            values = json.loads((folder / process_folder() / "values.json").read_text())
            return next(value for key, value in values.items() if key.endswith(".zero_stage"))
    return None


def process_folder() -> str:
    """Return the name of the folder of this process in a checkpoint."""
    return f"{rank()}-of-{world_size()}"


def check_num_processes(folder: Path) -> None:
    """Raise InputError if a checkpoint was saved by another number of processes."""
    numbers = {path.name.rpartition("-")[2] for path in folder.iterdir()}
    if numbers and str(world_size()) not in numbers:
        raise InputError(
            f"{folder} was saved by {numbers.pop()} processes, this run has {world_size()}: set"
            " nodes and gpus_per_node back, or delete the folder"
        )


def is_undamaged(folder: Path) -> bool:
    """Return whether a folder of a checkpoint has exactly the files that were saved."""
    try:
        saved = json.loads((folder / "files.json").read_text())
    except (OSError, ValueError, RecursionError):
        return False
    files = result_files(folder)
    del files["files.json"]
    return files == saved


def stop_signal(signals: list[signal.Signals]) -> int:
    """Return the number of the first signal that a process received, 0 if none did."""
    return all_reduce_max(signals[0].value if signals else 0)


@contextlib.contextmanager
def received_signals() -> Iterator[list[signal.Signals]]:
    """Collect SIGTERM and SIGINT in a list, instead of their effect, within the context.

    After one of them, both are ignored until the process ends: a cluster and Snakemake may signal a
    job again while it stops.
    """
    received: list[signal.Signals] = []

    def collect(number: int, _: FrameType | None) -> None:
        received.append(signal.Signals(number))

    handlers = {
        number: signal.signal(number, collect) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_IGN if received else handler)
