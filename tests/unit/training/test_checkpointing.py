"""Checkpoints: a run that is interrupted anywhere resumes as if it had not been interrupted."""

import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import ROOT
from snakechat.training import checkpointing
from snakechat.training.checkpointing import Checkpointer
from snakechat.workflow.code_digests import code_digests
from snakechat.workflow.job import Job, run
from snakechat.workflow.placement import SERIAL
from snakechat.workflow.run_options import RunOptions

STEPS = 8
SIGNALS = [signal.SIGTERM, signal.SIGINT]


class Clock:
    """Stands still unless its time is set."""

    now = 0.0

    def monotonic(self):
        return self.now


class Walk:
    """A component of a run: a position and the moves that led to it."""

    def __init__(self):
        self.position, self.moves = torch.zeros(3), []
        self.when_saved = lambda: None

    def move(self, batch, by):
        self.position += by
        self.moves.append([batch, by.sum().item()])

    def state_dict(self):
        self.when_saved()
        return {"position": self.position, "moves": self.moves}

    def load_state_dict(self, state):
        self.position, self.moves = state["position"], state["moves"]


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

    before = {which: signal.signal(which, unexpected) for which in SIGNALS}
    yield unexpected
    for which, handler in before.items():
        signal.signal(which, handler)


def make_job(save_steps=1, rule="train_sft", name="tiny", made_from="0", **settings):
    spec = {"rule": rule, "name": name, "path": f"output/sft/{name}", "inputs": {}}
    tokens = {"rule": "tokenize_sft", "name": name, "path": "x", "inputs": {}, "files": {}}
    files = {"rows": {"size": 1, "sha256": made_from}}
    manifest = {"spec": {**tokens, "settings": {}}, "inputs": {}, "lineage": {}, "files": files}
    return Job(
        {**spec, "settings": settings, "requirements": {}},
        {"tokens": {**manifest, "facts": {}}},
        SERIAL,
        RunOptions(save_steps=save_steps),
        SimpleNamespace,
    )


def walk(job, steps=STEPS, at=None, component=None):
    """Run in a new process, which draws and logs in each step; return its component and steps.

    at: functions to call in steps, by number.
    """
    shutil.rmtree(job.result, ignore_errors=True)
    job.result.mkdir(parents=True)
    torch.manual_seed(7)
    torch.rand(2)
    component = component or Walk()
    checkpointer, done = Checkpointer(job, walk=component), []
    with (job.result / "metrics.jsonl").open("a") as log:
        for step, batch in checkpointer.steps(f"rows {number}" for number in range(steps)):
            component.move(batch, torch.rand(3))
            log.write(json.dumps({"step": step, "at": component.position.tolist()}) + "\n")
            log.flush()
            done.append(step)
            if at and step in at:
                at[step]()
    return component, done


def kill():
    raise KilledError


def send(*signals):
    """Return a function that sends signals to this process."""
    return lambda: [os.kill(os.getpid(), which) for which in signals]


def stop(job, step, which=signal.SIGTERM, **options):
    """Run until a signal arrives in a step; return the message."""
    with pytest.raises(SystemExit) as stopped:
        walk(job, at={step: send(which)}, **options)
    return stopped.value.code


def saved_steps(job):
    """Return the steps of the existing checkpoints."""
    return [int(path.name) for path in checkpointing.checkpoints(job.states)]


def outcome(job, **options):
    """Return everything that a run makes: lines, position, moves."""
    component, _ = walk(job, **options)
    return (job.result / "metrics.jsonl").read_bytes(), component.position.tolist(), component.moves


@pytest.fixture
def expected():
    """The outcome of an uninterrupted run."""
    return outcome(make_job(name="uninterrupted"))


@pytest.mark.parametrize("step", [1, 5, STEPS])
def test_a_run_stopped_after_any_step_resumes_with_its_generators(step, expected):
    stop(make_job(save_steps=100), step)
    assert outcome(make_job(save_steps=100)) == expected


@pytest.mark.parametrize("step", [1, 4, 5, STEPS])
def test_a_run_killed_in_any_step_resumes_from_its_last_checkpoint(step, expected):
    with pytest.raises(KilledError):
        walk(job := make_job(save_steps=2), at={step: kill})
    saved = (step - 1) // 2 * 2
    assert (saved_steps(job) or [0])[-1] == saved
    component, done = walk(job)
    assert done == list(range(saved + 1, STEPS + 1))
    # Repeated steps are logged once.
    assert (
        (job.result / "metrics.jsonl").read_bytes(),
        component.position.tolist(),
        component.moves,
    ) == expected


def test_tensors_and_values_are_restored_exactly():
    class Mixed(Walk):
        def state_dict(self):
            return {
                "bf16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
                "none": torch.zeros(0, 4),
                "one": torch.tensor(3.0),
                "of.dots": torch.arange(6).view(2, 3),
                "rate": 0.1 + 0.2,
                "rates": [1e-30, 3],
            }

        def load_state_dict(self, state):
            self.restored = state

    stop(make_job(), 1, component=(saved := Mixed()))
    walk(make_job(), component=(component := Mixed()))
    assert component.restored.keys() == saved.state_dict().keys()
    for name, value in saved.state_dict().items():
        restored = component.restored[name]
        if torch.is_tensor(value):
            assert torch.equal(restored, value), name
            assert restored.dtype == value.dtype, name
        else:
            assert restored == value, name


@pytest.mark.parametrize(("save_steps", "kept"), [(1, [7, 8]), (3, [3, 6]), (9, [])])
def test_checkpoints_are_saved_every_save_steps_and_the_last_two_are_kept(save_steps, kept):
    walk(job := make_job(save_steps))
    assert saved_steps(job) == kept


def slow(clock, seconds):
    """Return a component whose state takes a number of seconds to save."""
    component = Walk()
    component.saved = []

    def when_saved():
        component.saved.append(len(component.moves))
        clock.now += seconds

    component.when_saved = when_saved
    return component


def takes(clock, seconds, steps):
    """Return functions that make each step take a number of seconds."""

    def wait():
        clock.now += seconds

    return dict.fromkeys(range(1, steps + 1), wait)


def test_saving_takes_at_most_a_twentieth_of_the_time(clock):
    component = slow(clock, 1)
    walk(make_job(), steps=100, at=takes(clock, 1, 100), component=component)
    # The first save lasts from 1 to 2; the next follows 20 seconds later, at 22.
    assert component.saved == [1, 21, 41, 61, 81]
    assert len(component.saved) / clock.now < 0.05


def flip(position):
    """Return a function that flips a bit of a file."""

    def damage(path):
        content = bytearray(path.read_bytes())
        content[position] ^= 4
        path.write_bytes(content)

    return damage


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def edit(path):
    path.write_text(path.read_text().replace('"step": 6', '"step": 5'))


def delete(path):
    path.unlink()


DAMAGES = [
    ("tensors.safetensors", flip(-1)),
    ("tensors.safetensors", cut),
    ("values.json", edit),
    ("metrics.jsonl", delete),
    ("files.json", cut),
    ("files.json", delete),
]


def damage(state, name, how):
    before = (state / name).read_bytes()
    how(state / name)
    assert how is delete or (state / name).read_bytes() != before


@pytest.mark.parametrize(("name", "how"), DAMAGES)
def test_a_damaged_checkpoint_is_ignored(name, how, expected, capsys):
    with pytest.raises(KilledError):
        walk(job := make_job(save_steps=3), at={7: kill})
    assert saved_steps(job) == [3, 6]
    damage(job.states / "00000006/0-of-1", name, how)
    capsys.readouterr()
    job = make_job(save_steps=100)
    assert outcome(job) == expected
    assert job.record["resumed_after_step"] == 3
    assert capsys.readouterr().err == (
        f"warning: {job.states}/00000006 is damaged and ignored\nresuming after step 3\n"
    )
    assert saved_steps(job) == [3]


def test_a_run_without_an_undamaged_checkpoint_starts_from_the_beginning(expected, capsys):
    with pytest.raises(KilledError):
        walk(job := make_job(save_steps=3), at={7: kill})
    damage(job.states / "00000003/0-of-1", "tensors.safetensors", flip(-1))
    damage(job.states / "00000006/0-of-1", "files.json", delete)
    component, done = walk(job)
    assert done == list(range(1, STEPS + 1))
    assert (
        (job.result / "metrics.jsonl").read_bytes(),
        component.position.tolist(),
        component.moves,
    ) == expected
    assert job.record["resumed_after_step"] == 0
    warnings = capsys.readouterr().err.splitlines()
    assert [line.split(" is damaged")[0][-8:] for line in warnings] == ["00000006", "00000003"]


def test_a_run_that_fails_while_it_saves_keeps_earlier_checkpoints(monkeypatch, expected):
    calls = itertools.count(1)
    works = checkpointing.save_file

    def fails(*arguments):
        works(*arguments)
        if next(calls) == 3:
            raise OSError(28, "No space left on device")
        return works(*arguments)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(checkpointing, "save_file", fails)
        walk(job := make_job(save_steps=2))
    assert saved_steps(job) == [2, 4]
    assert outcome(make_job()) == expected


@pytest.mark.parametrize("which", SIGNALS)
def test_a_signal_saves_and_ends_the_run(which):
    message = stop(job := make_job(save_steps=100), 4, which)
    assert message == (
        f"stopped by {which.name} after step 4: run the same command again to resume"
    )
    assert saved_steps(job) == [4]
    assert (job.states / "00000004/0-of-1/metrics.jsonl").read_text().count("\n") == 4


@pytest.mark.parametrize("step", [2, STEPS])
def test_a_second_signal_does_not_end_a_run_that_stops(step):
    # A cluster signals each process of a job, and Snakemake passes the signal on.
    stop(make_job(), step)
    send(*SIGNALS)()


def test_signal_handlers_are_restored_when_a_run_ends_or_fails(handlers):
    walk(make_job())
    assert [signal.getsignal(which) for which in SIGNALS] == [handlers] * 2
    with pytest.raises(KilledError):
        walk(make_job(seed=2), at={3: kill})
    assert [signal.getsignal(which) for which in SIGNALS] == [handlers] * 2


def test_further_signals_during_a_save_do_not_damage_it(expected):
    component = Walk()
    component.when_saved = send(*SIGNALS)
    message = stop(job := make_job(save_steps=100), 3, component=component)
    assert message.startswith("stopped by SIGTERM after step 3:")
    assert saved_steps(job) == [3]
    assert outcome(make_job()) == expected


def test_a_signal_during_a_save_ends_the_run_after_it(expected):
    component = Walk()
    component.when_saved = send(signal.SIGTERM)
    with pytest.raises(SystemExit, match="stopped by SIGTERM after step 6:"):
        walk(job := make_job(save_steps=6), component=component)
    assert saved_steps(job) == [6]
    assert outcome(make_job()) == expected


@pytest.fixture
def program(monkeypatch):
    """A function that runs a whole program with a given main."""
    path = ROOT / "scripts/train_sft.py"
    # This process would hold the lock until it ends.
    monkeypatch.setattr("snakechat.workflow.job.acquire_lock", lambda path: None)

    def start(main, save_steps=2):
        spec = {**make_job().spec, "code": code_digests(path)}
        Path("spec.json").write_text(json.dumps(spec))
        options = json.dumps({"save_steps": save_steps})
        monkeypatch.setattr(sys, "argv", [str(path), "--spec", "spec.json", "--options", options])
        run(main)

    return start


def test_ctrl_c_outside_the_loop_is_reported_in_one_line(program):
    def interrupted(job):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        program(interrupted)
    assert stopped.value.code == "stopped by SIGINT"
