"""Checkpoints: a run that is interrupted anywhere resumes as if it had not been interrupted."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from snakechat.training import checkpointing
from snakechat.training.checkpointing import Checkpointer, write_tensors
from snakechat.training.engine import STATE_LOCK
from snakechat.workflow.job import Job
from snakechat.workflow.processes import SERIAL, RunOptions

STEPS = 8
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]


class Clock:
    """Stands still unless its time is set."""

    now = 0.0

    def monotonic(self):
        return self.now


class Walk:
    """A component of a run: a position and the moves that led to it."""

    def __init__(self):
        self.position, self.moves = torch.zeros(3), []

    def move(self, batch, by):
        self.position += by
        self.moves.append([batch, by.sum().item()])

    def state_dict(self):
        return {"position": self.position, "moves": self.moves}

    def load_state_dict(self, state):
        self.position, self.moves = state["position"], state["moves"]


@pytest.fixture
def when_saved(monkeypatch):
    """A function that has another one called after tensors are saved."""

    def call(function):
        def write(*arguments):
            write_tensors(*arguments)
            function()

        monkeypatch.setattr(checkpointing, "write_tensors", write)

    return call


class KilledError(Exception):
    """Stands for SIGKILL: nothing is saved after it."""


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The clock of the module; as it stands still, saving takes no time."""
    clock = Clock()
    monkeypatch.setattr(checkpointing, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def handlers(monkeypatch, tmp_path):
    """A working directory, and signal handlers that fail if they are called."""
    monkeypatch.chdir(tmp_path)

    def unexpected(number, _):
        raise AssertionError(f"signal {number} was not handled")

    for which in SIGNALS:
        signal.signal(which, unexpected)


def make_job(save_steps=1, name="tiny"):
    spec = {"rule": "train_sft", "name": name, "path": f"output/sft/{name}", "inputs": {}}
    spec |= {"settings": {"name": name}, "requirements": {}}
    return Job(spec, {}, SERIAL, RunOptions(save_steps=save_steps), SimpleNamespace)


def walk(job, steps=STEPS, at=None, component=None, sampling=None):
    """Run in a new process, which draws and logs in each step; return its component.

    at, sampling: Functions to call in the update of steps, or before it, by number.
    """
    shutil.rmtree(job.result, ignore_errors=True)
    job.result.mkdir(parents=True)
    torch.manual_seed(7)
    torch.rand(2)
    component = component or Walk()
    checkpointer = Checkpointer(job, walk=component)
    with checkpointer, (job.result / "metrics.jsonl").open("a") as log:
        for step, batch in checkpointer.steps([f"rows {number}" for number in range(steps)]):
            by = torch.rand(3)
            (sampling or {}).get(step, list)()
            # As the update of an engine.
            STATE_LOCK.begin()
            (at or {}).get(step, list)()
            component.move(batch, by)
            log.write(json.dumps({"step": step, "at": component.position.tolist()}) + "\n")
            log.flush()
            checkpointer.keep(step)
    return component


def kill():
    raise KilledError


def send(*signals):
    """Return a function that sends signals to this process."""
    return lambda: [os.kill(os.getpid(), which) for which in signals]


def saved_steps(job):
    """Return the steps of the whole checkpoints."""
    found = filter(checkpointing.has_all_parts, checkpointing.checkpoints(job.states))
    return [int(path.name) for path in found]


def outcome(job):
    """Return everything that a run makes: lines, position, moves."""
    component = walk(job)
    return (job.result / "metrics.jsonl").read_bytes(), component.position.tolist(), component.moves


@pytest.fixture
def expected():
    """The outcome of an uninterrupted run."""
    return outcome(make_job(name="uninterrupted"))


@pytest.mark.parametrize(
    ("step", "number"), [(1, SIGNALS[0]), (5, SIGNALS[1]), (STEPS, SIGNALS[2])]
)
def test_a_run_stopped_after_any_step_resumes_with_its_generators(step, number, expected):
    with pytest.raises(SystemExit) as stopped:
        walk(job := make_job(save_steps=100), at={step: send(number)})
    how = f"stopped by {signal.Signals(number).name} after step {step}"
    assert stopped.value.code == f"{how}: run the same command again to resume"
    assert saved_steps(job) == [step]
    # A cluster signals each process of a job, and Snakemake passes the signal on.
    send(*SIGNALS)()
    assert outcome(make_job(save_steps=100)) == expected


@pytest.mark.parametrize("step", [1, 5])
def test_a_run_killed_in_any_step_resumes_from_its_last_checkpoint(step, expected):
    with pytest.raises(KilledError):
        walk(job := make_job(save_steps=2), at={step: kill})
    saved = (step - 1) // 2 * 2
    assert (saved_steps(job) or [0])[-1] == saved
    # Repeated steps are logged once.
    assert outcome(job) == expected
    assert job.record["resumed_after_step"] == saved


def test_checkpoints_are_saved_every_save_steps_and_the_last_two_are_kept():
    walk(job := make_job(save_steps=2))
    assert saved_steps(job) == [6, 8]


def test_saving_takes_at_most_a_twentieth_of_the_time(clock, when_saved):
    component, saved = Walk(), []

    def wait():
        clock.now += 1

    def save():
        saved.append(len(component.moves))
        wait()

    when_saved(save)
    walk(make_job(), steps=100, at=dict.fromkeys(range(1, 101), wait), component=component)
    # The first save lasts from 1 to 2; the next follows 20 seconds later, at 22.
    assert saved == [1, 21, 41, 61, 81]
    assert len(saved) / clock.now < 0.05


def flip(path):
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "how", "damaged"),
    [
        ("walk.position.npy", flip, [6]),
        ("files.json", Path.unlink, [3, 6]),
    ],
)
def test_a_damaged_checkpoint_is_ignored(name, how, damaged, expected, capsys):
    with pytest.raises(KilledError):
        walk(job := make_job(save_steps=3), at={7: kill})
    assert saved_steps(job) == [3, 6]
    for step in damaged:
        how(job.states / f"{step:08}/0-of-1" / name)
    capsys.readouterr()
    job = make_job(save_steps=100)
    assert outcome(job) == expected
    warnings = [f"{job.states}/{step:08} is damaged and ignored" for step in reversed(damaged)]
    resumed = ["resuming after step 3"] * (damaged == [6])
    lines = [f"warning: {warning}" for warning in warnings] + resumed
    assert capsys.readouterr().err.splitlines() == lines
    assert job.record["resumed_after_step"] == 3 * len(resumed)


def test_a_run_that_fails_while_it_saves_keeps_earlier_checkpoints(when_saved, expected):
    effects = [None, None, OSError(28, "No space left on device")]

    def fail():
        if effects and (error := effects.pop(0)):
            raise error

    when_saved(fail)
    with pytest.raises(OSError, match="No space"):
        walk(job := make_job(save_steps=2))
    # Half of another one does not count.
    assert (job.states / "00000006/.0-of-1").exists()
    assert saved_steps(job) == [2, 4]
    assert outcome(make_job()) == expected


@pytest.mark.parametrize(("save_steps", "at", "step"), [(6, {}, 6), (100, {3: SIGNALS}, 3)])
def test_a_signal_during_a_save_ends_the_run_after_it(save_steps, at, step, expected, when_saved):
    # It is the first one, or one after the signal that caused the save.
    when_saved(send(*SIGNALS))
    at = {number: send(*signals) for number, signals in at.items()}
    with pytest.raises(SystemExit, match=f"stopped by SIGTERM after step {step}:"):
        walk(job := make_job(save_steps), at=at)
    assert saved_steps(job) == [step]
    when_saved(lambda: None)
    assert outcome(make_job()) == expected


@pytest.mark.parametrize("step", [1, 4])
def test_a_signal_in_the_middle_of_a_step_saves_the_one_before(step, expected):
    started = time.monotonic()

    def sample():
        threading.Timer(0.1, send(signal.SIGTERM)).start()
        time.sleep(60)

    with pytest.raises(SystemExit) as stopped:
        walk(job := make_job(save_steps=100), sampling={step: sample})
    assert time.monotonic() - started < 30
    after = f"after step {step - 1}" if step > 1 else "before the first step ended"
    assert stopped.value.code == f"stopped by SIGTERM {after}: run the same command again to resume"
    assert saved_steps(job) == ([step - 1] if step > 1 else [])
    assert outcome(make_job()) == expected


def test_a_step_that_is_not_taken_does_not_count():
    steps = Checkpointer(job := make_job(), walk=Walk()).steps(range(STEPS))
    # As early stopping does, which evaluates the model after step 2.
    assert [next(steps)[0] for _ in range(3)] == [1, 2, 3]
    assert job.record["steps"] == 2


def test_a_state_has_the_logs_and_the_outcome_of_its_step(expected):
    """What is logged after it, such as an evaluation, is repeated."""
    job = make_job(save_steps=100)
    job.result.mkdir(parents=True)
    log = job.result / "metrics.jsonl"
    checkpointer = Checkpointer(job, walk=Walk())
    with pytest.raises(SystemExit), checkpointer, log.open("a", buffering=1) as file:
        for step, _ in checkpointer.steps(range(STEPS)):
            file.write(f"step {step}\n")
            checkpointer.keep(step, {"loss": 0.1 + 0.2})
            file.write("evaluated\n")
            send(signal.SIGTERM)()
            # The evaluation goes on.
            time.sleep(60)
    log.unlink()
    again = Checkpointer(make_job(save_steps=100), walk=Walk())
    assert (again.step, again.outcome) == (1, {"loss": 0.1 + 0.2})
    assert log.read_text() == "step 1\n"


def test_tensors_are_written_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpointing, "WRITTEN_ELEMENTS", 4)
    dtypes = (torch.float32, torch.int64, torch.bool)
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype).T for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 2)}
    write_tensors(tmp_path, tensors)
    for name, tensor in tensors.items():
        loaded = torch.from_numpy(np.load(tmp_path / f"{name}.npy"))
        assert loaded.dtype == tensor.dtype and torch.equal(loaded, tensor)
