"""A training run that was stopped goes on where it was.

Between steps its state is saved: output/state/RULE/NAME/DIGEST/STEP, which belongs to one spec and
one set of inputs. Each process keeps its own part in a folder of it, RANK-of-PROCESSES. A state
appears whole or not at all; the last two are kept, and none once the result is published.
Everything that a loop changes is in it. What is a function of the seed and the step (the order of
the rows) is not, so a run can go on under another placement.
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import time

import torch
from safetensors.torch import load_file, save_file

from snakechat.workflow.distributed import barrier, from_first, largest, rank, world_size
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import result_files

KEPT = 2
# Of the time: saving waits, whatever save_steps says, rather than take more.
LARGEST_SHARE = 0.05


class Checkpointer:
    """The steps of a run, whose parts are put back into their last saved state at once.

    A part has state(), a dict of tensors and of values that JSON has, and restore(state).
    """

    def __init__(self, job, **parts):
        self.job = job
        self.parts = {**parts, "generators": Generators()}
        self.next_save = 0.0
        self.done = self._restore()
        job.record.update(resumed_after_step=self.done, steps=self.done, saving_seconds=0.0)

    def steps(self, batches):
        """Yield (step, batch) of all steps that are left. Saves when it is time to, and when asked
        to stop by SIGTERM (a cluster that needs the node) or SIGINT (Ctrl-C), which then ends the
        program: all processes after the same step, whichever of them was asked.
        """
        seconds = []
        with stop_signals() as signals:
            for step, batch in enumerate(batches, start=1):
                if step <= self.done:
                    continue
                self.job.record["steps"] = step
                started = time.monotonic()
                yield step, batch
                seconds.append(time.monotonic() - started)
                self._tell(seconds)
                asked = asked_to_stop(signals)
                due = step % self.job.placement["save_steps"] == 0
                if asked or (due and from_first(time.monotonic() >= self.next_save)):
                    self._save(step)
                    # A signal may have come meanwhile.
                    asked = asked or asked_to_stop(signals)
                if asked:
                    said = (
                        f"stopped by {signal.Signals(asked).name} after step {step}: the same"
                        " command goes on from there"
                    )
                    sys.exit(said if rank() == 0 else 1)

    def _tell(self, seconds):
        """Put into the job's record what its steps are like so far: a loop may end after any."""
        self.job.record["seconds_a_step"] = round(statistics.median(seconds), 6)
        if peak := torch.cuda.max_memory_allocated():
            self.job.record["gpu"] = torch.cuda.get_device_name()
            self.job.record["peak_gpu_memory_mb"] = round(peak / 2**20)

    def _save(self, step):
        started = time.monotonic()
        tensors, values = {}, {"step": step}
        for name, part in self.parts.items():
            for key, value in part.state().items():
                (tensors if torch.is_tensor(value) else values)[f"{name}.{key}"] = value
        temporary = self.job.states / ".tmp"
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        barrier()
        own = temporary / own_part()
        own.mkdir()
        save_file(tensors, own / "tensors.safetensors")
        (own / "values.json").write_text(json.dumps(values))
        if rank() == 0:
            for lines in self.job.result.glob("*.jsonl"):
                shutil.copyfile(lines, own / lines.name)
        (own / "files.json").write_text(json.dumps(result_files(own)))
        barrier()
        if rank() == 0:
            os.replace(temporary, self.job.states / f"{step:08}")
            for old in saved_states(self.job.states)[:-KEPT]:
                shutil.rmtree(old)
        now = time.monotonic()
        self.next_save = now + (now - started) / LARGEST_SHARE
        saving = self.job.record["saving_seconds"] + now - started
        self.job.record["saving_seconds"] = round(saving, 3)

    def _restore(self):
        """Put the last whole state back; returns its step, 0 where there is none."""
        for folder in reversed(saved_states(self.job.states)):
            check_processes(folder)
            own = folder / own_part()
            if largest(not is_whole(own)):
                if rank() == 0:
                    print(f"warning: {folder} is damaged: going on without it", file=sys.stderr)
                    shutil.rmtree(folder)
                continue
            values = json.loads((own / "values.json").read_text())
            state = {**load_file(own / "tensors.safetensors"), **values}
            for name, part in self.parts.items():
                start = f"{name}."
                part.restore(
                    {key.removeprefix(start): state[key] for key in state if key.startswith(start)}
                )
            if rank() == 0:
                for lines in own.glob("*.jsonl"):
                    shutil.copyfile(lines, self.job.result / lines.name)
                print(f"going on after step {values['step']}", file=sys.stderr)
            return values["step"]
        return 0


class Generators:
    """torch's generators: what is drawn in a loop is drawn from them."""

    def __init__(self):
        self.generators = {"cpu": torch.default_generator}
        if torch.cuda.is_available():
            self.generators["cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]

    def state(self):
        """Their states, as bytes."""
        return {name: generator.get_state() for name, generator in self.generators.items()}

    def restore(self, state):
        """Put back what was saved on a device that is here too."""
        for name in state.keys() & self.generators:
            self.generators[name].set_state(state[name])


def saved_states(folder):
    """The states of a run, oldest first."""
    return sorted(path for path in folder.glob("*") if path.name.isdigit())


def own_part():
    """The folder that this process has in each state."""
    return f"{rank()}-of-{world_size()}"


def check_processes(folder):
    """Raise InputError if a state was cut up for another number of processes."""
    numbers = {part.name.rpartition("-")[2] for part in folder.iterdir()}
    if numbers and str(world_size()) not in numbers:
        raise InputError(
            f"{folder} is a state of {numbers.pop()} processes, this run has {world_size()}: set"
            " nodes and gpus_per_node back, or delete the folder"
        )


def is_whole(folder):
    """Whether a part of a state has the files that were saved."""
    try:
        saved = json.loads((folder / "files.json").read_text())
    except (OSError, ValueError):
        return False
    there = result_files(folder)
    del there["files.json"]
    return there == saved


def asked_to_stop(signals):
    """The number of a signal that came to some process; 0 if none did."""
    return largest(signals[0].value if signals else 0)


@contextlib.contextmanager
def stop_signals():
    """A list in which SIGTERM and SIGINT stand as soon as they came, instead of what they do."""
    came = []
    before = {
        which: signal.signal(which, lambda number, _: came.append(signal.Signals(number)))
        for which in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield came
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
