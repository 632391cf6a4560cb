"""Checkpoints, from which an interrupted training run resumes.

A checkpoint is the folder STORE/RULE/.KEY/state/STEP; KEY identifies the spec and the inputs. It
contains one folder per process, RANK-of-PROCESSES, which appears atomically; it counts if it has
all of them. The last two are kept, and all are deleted when the result is published.

A checkpoint contains everything that the training loop changes. The order of rows is a function of
the seed and the step, so a run can resume under another placement.

After SIGTERM, SIGINT or SIGHUP, a thread of each process saves the state after its last step, while
the process samples, scores, evaluates or waits for others, and ends the process once all have saved
the same. Processes may stop in the middle of a step: what they lose is that step. A process that
has run out of memory saves its part likewise, and the launcher sends SIGTERM to the others.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful

from snakechat.training.engine import STATE_LOCK
from snakechat.training.rungs import noted_number
from snakechat.workflow.errors import InputError, is_out_of_memory, warn
from snakechat.workflow.job import Job
from snakechat.workflow.manifest import result_files
from snakechat.workflow.processes import (
    all_reduce_max,
    barrier,
    broadcast_from_first,
    rank,
    stop_signals,
    world_size,
)

CHECKPOINTS_KEPT = 2
# Largest fraction of the time spent on saving; checkpoints that would exceed it are skipped.
MAX_SAVING_FRACTION = 0.05
# Tensors of up to this many bytes are copied after each step. Larger ones change only while the
# state is locked.
MAX_COPIED_BYTES = 1 << 20
# Elements of a tensor that are copied from a GPU and written at a time.
WRITTEN_ELEMENTS = 1 << 24
# Seconds between two looks for the checkpoints of other processes, or between two signals to the
# main thread, which has to end after the state is saved.
POLL_SECONDS = 0.2
# Signals to the main thread. It may wait for another process, or for a reply of a server.
EXIT_SIGNALS = 50


class Attributes:
    """A component whose state is some of its attributes, JSON values."""

    saved: tuple[str, ...]

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        vars(self).update(state_dict)


class Checkpointer:
    """Iterates over the steps of a run and saves checkpoints.

    The components are restored from the last checkpoint, if any, when the object is created: their
    states are dicts of tensors and JSON values. Within its context, signals end the run after the
    state is saved.

    Attributes:
        step: The step after which the state was kept: at first of the restored checkpoint, or 0.
        outcome: Of that step, JSON values by name for a run that resumes.
        tensors: Of this process after that step, by COMPONENT.NAME; the small ones are copies.
        values: The other values, with step and outcome, as JSON.
        log_bytes: Sizes of the logs then, by name.
    """

    def __init__(self, job: Job[Any], **components: Stateful) -> None:
        self.job, self.components = job, components
        self.next_save, self.seconds = 0.0, list[float]()
        self._keep_state(*self._restore())
        job.record.update(resumed_after_step=self.step, steps=self.step, saving_seconds=0.0)
        self.rung_number = noted_number(job.states)
        self.signal, self.line, self.closed = 0, "", threading.Event()

    def __enter__(self) -> "Checkpointer":
        # Python's handlers run in the main thread, which may be in a call that does not return.
        # This file descriptor is written to at once.
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.previous = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        self.handlers = {number: signal.signal(number, self._handle) for number in stop_signals()}
        self.main_thread = threading.get_ident()
        self.thread = threading.Thread(target=self._end_after_signal, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if is_out_of_memory(error) and not STATE_LOCK.is_changing:
            # The run goes on with another placement.
            self._save_part()
        if isinstance(error, Exception) and self.signal:
            # Another process may have saved its part and ended. The thread ends this one, too.
            self.thread.join(EXIT_SIGNALS * POLL_SECONDS)
        record = self.job.record
        if self.seconds:
            record["seconds_per_step"] = round(float(np.median(self.seconds)), 6)
        if peak := torch.cuda.max_memory_allocated():
            record |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
            record["peak_gpu_memory_mb"] = round(peak / 2**20)
            if torch.distributed.is_nccl_available():
                record["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        self.closed.set()
        STATE_LOCK.end()
        signal.set_wakeup_fd(self.previous)
        os.write(self.writer, bytes(1))
        self.thread.join()
        for descriptor in (self.reader, self.writer):
            os.close(descriptor)
        for number, handler in self.handlers.items():
            # A cluster and Snakemake may signal a job again while it stops.
            signal.signal(number, signal.SIG_IGN if self.signal else handler)

    def steps(self, batches: Sequence[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (step, batch) of the remaining steps; `keep` has to be called in each."""
        for step, batch in enumerate(batches[self.step :], start=self.step + 1):
            started = time.monotonic()
            yield step, batch
            # Not before: a training that stops early does not take the last step that it gets.
            self.job.record["steps"] = step
            self.seconds.append(time.monotonic() - started)

    def keep(self, step: int, outcome: Any = None) -> None:
        """Keep the state after the updates of a step, which a signal saves until the next one.

        Saves a checkpoint every options.save_steps steps. After SIGTERM (preemption on a cluster)
        or SIGINT (Ctrl-C) in any process, all processes save the same checkpoint and exit.
        """
        self._keep_state(step, outcome)
        due = step % self.job.options.save_steps == 0
        if due and broadcast_from_first(time.monotonic() >= self.next_save):
            started = time.monotonic()
            STATE_LOCK.begin()
            self._save_part()
            STATE_LOCK.end()
            barrier()
            if rank() == 0:
                for old in checkpoints(self.job.states)[:-CHECKPOINTS_KEPT]:
                    shutil.rmtree(old)
            seconds, record = time.monotonic() - started, self.job.record
            self.next_save = started + seconds + seconds / MAX_SAVING_FRACTION
            record["saving_seconds"] = round(record["saving_seconds"] + seconds, 3)
        if number := all_reduce_max(self.signal):
            if not self.signal:
                os.kill(os.getpid(), number)
            self.thread.join()
            # The thread could not save the state.
            self._save_part()

    def _keep_state(self, step: int, outcome: Any) -> None:
        STATE_LOCK.begin()
        values: dict[str, Any] = {}
        self.tensors = {"generators.cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            self.tensors["generators.cuda"] = torch.cuda.get_rng_state()
        for component, each in self.components.items():
            for name, value in each.state_dict().items():
                if torch.is_tensor(value):
                    is_small = value.nbytes <= MAX_COPIED_BYTES
                    self.tensors[f"{component}.{name}"] = value.clone() if is_small else value
                else:
                    values[f"{component}.{name}"] = value
        self.step, self.outcome = step, outcome
        self.values = json.dumps(values | {"step": step, "outcome": outcome})
        self.log_bytes = {log.name: log.stat().st_size for log in self.job.result.glob("*.jsonl")}
        STATE_LOCK.end()

    def _handle(self, number: int, _: object) -> None:
        """Note the first signal, in the main thread; or exit, if the other thread asks for it."""
        self.signal = self.signal or number
        if self.line and not self.closed.is_set():
            self.closed.set()
            sys.exit(self.line if rank() == 0 else 1)

    def _end_after_signal(self) -> None:
        """Wait for a signal; save the state, and exit when all processes have saved the same."""
        number = 0
        # Reward functions may use other signals.
        while number not in self.handlers:
            [number] = os.read(self.reader, 1)
            if self.closed.is_set():
                return
        # The checkpoints of which this process has saved its part. Other processes may be a step
        # ahead, or learn of the signal at the end of the step.
        folders: set[Path] = set()
        while not self.line:
            # Without the lock, the state changes now.
            if STATE_LOCK.lock.acquire(timeout=POLL_SECONDS):
                try:
                    if self.closed.is_set():
                        return
                    folders.add(self._save_part())
                except OSError as error:
                    warn(f"the state cannot be saved: {error}")
                    return
                finally:
                    STATE_LOCK.lock.release()
            saved = [int(each.name) for each in folders if has_all_parts(each)]
            if noted_number(self.job.states) > self.rung_number:
                # The process that ran out of memory may have no part.
                self.line = "another process has run out of memory: all start again"
            elif saved:
                after = f"after step {saved[0]}" if saved[0] else "before the first step ended"
                name = signal.Signals(number).name
                self.line = f"stopped by {name} {after}: run the same command again to resume"
            elif self.closed.wait(POLL_SECONDS):
                return
        for _ in range(EXIT_SIGNALS):
            # One that arrives just before the main thread waits does not interrupt the wait.
            signal.pthread_kill(self.main_thread, number)
            if self.closed.wait(POLL_SECONDS):
                return
        if rank() == 0:
            print(self.line, file=sys.stderr, flush=True)
        os._exit(1)

    def _save_part(self) -> Path:
        """Save the part of this process of the checkpoint of the state; return the checkpoint."""
        folder = self.job.states / f"{self.step:08}"
        own, temporary = folder / process_folder(), folder / f".{process_folder()}"
        if not self.step or own.exists():
            return folder
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        write_tensors(temporary, self.tensors)
        (temporary / "values.json").write_text(self.values)
        if rank() == 0:
            for name, size in self.log_bytes.items():
                shutil.copyfile(self.job.result / name, temporary / name)
                os.truncate(temporary / name, size)
        (temporary / "files.json").write_text(json.dumps(result_files(temporary)))
        os.replace(temporary, own)
        return folder

    def _restore(self) -> tuple[int, Any]:
        """Restore the last undamaged checkpoint; return its step, or 0, and outcome."""
        for folder in reversed(checkpoints(self.job.states)):
            check_num_processes(folder)
            own = folder / process_folder()
            if all_reduce_max(not is_undamaged(own)):
                if rank() == 0:
                    # Otherwise, the run ended before all processes had saved their parts.
                    if has_all_parts(folder):
                        print(f"warning: {folder} is damaged and ignored", file=sys.stderr)
                    shutil.rmtree(folder)
                continue
            state = json.loads((own / "values.json").read_text())
            state |= {path.stem: torch.from_numpy(np.load(path)) for path in own.glob("*.npy")}
            for name, component in self.components.items():
                keys = [key for key in state if key.startswith(f"{name}.")]
                component.load_state_dict({key[len(name) + 1 :]: state[key] for key in keys})
            torch.set_rng_state(state["generators.cpu"])
            if torch.cuda.is_available() and "generators.cuda" in state:
                torch.cuda.set_rng_state(state["generators.cuda"])
            if rank() == 0:
                for log in own.glob("*.jsonl"):
                    shutil.copyfile(log, self.job.result / log.name)
                print(f"resuming after step {state['step']}", file=sys.stderr)
            return state["step"], state["outcome"]
        return 0, {}


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors on any device as npy files, in parts, where np.save would copy each whole."""
    for name, tensor in tensors.items():
        flat = tensor.detach().reshape(-1)
        header = {"descr": flat[:0].cpu().numpy().dtype.str, "fortran_order": False}
        with (folder / f"{name}.npy").open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header | {"shape": tuple(tensor.shape)})
            for part in flat.split(WRITTEN_ELEMENTS):
                file.write(part.cpu().numpy())


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted(path for path in folder.glob("*") if path.is_dir() and path.name.isdigit())


def saved_values(states: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON values of this process in the checkpoints of a run, the last one first."""
    for folder in reversed(checkpoints(states)):
        with contextlib.suppress(OSError, ValueError):
            yield json.loads((folder / process_folder() / "values.json").read_text())


def process_folder() -> str:
    """Return the name of the folder of this process in a checkpoint."""
    return f"{rank()}-of-{world_size()}"


def has_all_parts(checkpoint: Path) -> bool:
    """Return whether all processes have saved their parts of a checkpoint; step 0 has none."""
    parts = (checkpoint / f"{part}-of-{world_size()}" for part in range(world_size()))
    return int(checkpoint.name) == 0 or all(part.exists() for part in parts)


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
    except (OSError, ValueError):
        return False
    # Outside of the try: a folder that cannot be read now is an error, and not a damaged one.
    return {k: v for k, v in result_files(folder).items() if k != "files.json"} == saved
