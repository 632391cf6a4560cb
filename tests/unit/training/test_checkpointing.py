"""Saved states of a run: stopped anywhere, it goes on as if it had never been stopped."""

import itertools
import json
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import ROOT
from snakechat.training import checkpointing
from snakechat.training.checkpointing import Checkpointer
from snakechat.workflow.code_digests import code_digests
from snakechat.workflow.job import Job, run

STEPS = 8
SIGNALS = [signal.SIGTERM, signal.SIGINT]


class Clock:
    """Stands still unless told how much time has passed."""

    now = 0.0

    def monotonic(self):
        return self.now


class Walk:
    """A part of a run: a place, and how it was reached."""

    def __init__(self):
        self.place, self.moves = torch.zeros(3), []
        self.when_saved = lambda: None

    def move(self, batch, by):
        self.place += by
        self.moves.append([batch, by.sum().item()])

    def state_dict(self):
        self.when_saved()
        return {"place": self.place, "moves": self.moves}

    def load_state_dict(self, state):
        self.place, self.moves = state["place"], state["moves"]


class KilledError(Exception):
    """Stands for a kill -9: nothing of the run is saved after it."""


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The clock of saving: with it standing still, saving takes no time at all."""
    clock = Clock()
    monkeypatch.setattr(checkpointing, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def handlers(monkeypatch, tmp_path):
    """A working directory, and handlers of signals that would show if they were called."""
    monkeypatch.chdir(tmp_path)

    def unexpected(number, _):
        raise AssertionError(f"signal {number} was not taken care of")

    before = {which: signal.signal(which, unexpected) for which in SIGNALS}
    yield unexpected
    for which, handler in before.items():
        signal.signal(which, handler)


def make_job(save_steps=1, rule="train_sft", name="tiny", made_from="0", **settings):
    spec = {"rule": rule, "name": name, "path": f"output/sft/{name}", "inputs": {}}
    tokens = {"rule": "tokenize_sft", "name": name, "path": "x", "inputs": {}, "files": {}}
    manifest = {"spec": {**tokens, "settings": {}}, "inputs": {}, "lineage": {}, "files": {}}
    path = Path(f"{made_from}.manifest.json")
    path.write_text(json.dumps({**manifest, "facts": {"made from": made_from}}))
    return Job(
        {**spec, "settings": settings},
        {"tokens": path},
        {"save_steps": save_steps},
        SimpleNamespace,
    )


def walk(job, steps=STEPS, at=None, part=None):
    """A run in a new process: draws in each step, and logs. Returns its part and its steps.

    at: what else is done in some steps, by number.
    """
    shutil.rmtree(job.result, ignore_errors=True)
    job.result.mkdir(parents=True)
    torch.manual_seed(7)
    torch.rand(2)
    part = part or Walk()
    training, done = Checkpointer(job, walk=part), []
    with (job.result / "metrics.jsonl").open("a") as log:
        for step, batch in training.steps(f"rows {number}" for number in range(steps)):
            part.move(batch, torch.rand(3))
            log.write(json.dumps({"step": step, "at": part.place.tolist()}) + "\n")
            log.flush()
            done.append(step)
            if at and step in at:
                at[step]()
    return part, done


def kill():
    raise KilledError


def send(*signals):
    """A function that sends signals to this process."""
    return lambda: [os.kill(os.getpid(), which) for which in signals]


def stop(job, step, which=signal.SIGTERM, **options):
    """A run that is asked to stop in a step. Returns what it says."""
    with pytest.raises(SystemExit) as stopped:
        walk(job, at={step: send(which)}, **options)
    return stopped.value.code


def states(job):
    """The steps whose states are there."""
    return [int(path.name) for path in checkpointing.checkpoints(job.states)]


def outcome(job, **options):
    """All that a run makes: the lines, the place, the moves."""
    part, _ = walk(job, **options)
    return (job.result / "metrics.jsonl").read_bytes(), part.place.tolist(), part.moves


@pytest.fixture
def expected():
    """The outcome of a run that is never stopped."""
    return outcome(make_job(name="whole"))


def test_a_run_without_states_has_all_steps():
    part, done = walk(job := make_job())
    assert done == list(range(1, STEPS + 1))
    assert [batch for batch, _ in part.moves] == [f"rows {number}" for number in range(STEPS)]
    assert job.record["resumed_after_step"] == 0


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_run_stopped_after_any_step_draws_what_it_would_have_drawn(step, expected):
    stop(make_job(save_steps=100), step)
    assert outcome(make_job(save_steps=100)) == expected


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_run_killed_in_any_step_goes_on_from_its_last_state(step, expected):
    with pytest.raises(KilledError):
        walk(job := make_job(save_steps=2), at={step: kill})
    saved = (step - 1) // 2 * 2
    assert (states(job) or [0])[-1] == saved
    part, done = walk(job)
    assert done == list(range(saved + 1, STEPS + 1))
    # The lines of steps that are done again are there once.
    assert (
        (job.result / "metrics.jsonl").read_bytes(),
        part.place.tolist(),
        part.moves,
    ) == expected


def test_all_lines_of_a_result_go_on_from_a_state_each_file_by_itself():
    def samples(job):
        """What a run does besides: lines of some steps in a file of their own."""

        def write(step):
            with (job.result / "responses.jsonl").open("a") as file:
                file.write(f'{{"step": {step}}}\n')

        return {step: partial(write, step) for step in (1, 5, 7)}

    job = make_job(save_steps=3)
    with pytest.raises(KilledError):
        walk(job, at=samples(job) | {8: kill})
    assert states(job) == [3, 6]
    walk(job, at=samples(job))
    # The seventh step was done twice.
    lines = (job.result / "responses.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 5, 7]
    lines = (job.result / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))


def test_a_run_may_be_stopped_as_often_as_one_likes(expected):
    for step in (1, 2, 5, 7):
        stop(make_job(save_steps=100), step)
    assert outcome(make_job(save_steps=100)) == expected


def test_only_the_steps_that_are_left_are_done():
    stop(make_job(save_steps=100), 5)
    part, done = walk(job := make_job())
    assert done == [6, 7, 8]
    assert [batch for batch, _ in part.moves[5:]] == ["rows 5", "rows 6", "rows 7"]
    assert job.record["resumed_after_step"] == 5


def test_it_is_said_where_a_run_goes_on(capsys):
    stop(make_job(save_steps=100), 5)
    assert capsys.readouterr().err == ""
    walk(make_job())
    assert capsys.readouterr().err == "resuming after step 5\n"


def test_tensors_and_values_come_back_as_they_were():
    class Odd(Walk):
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

    stop(make_job(), 1, part=(saved := Odd()))
    walk(make_job(), part=(part := Odd()))
    assert part.restored.keys() == saved.state_dict().keys()
    for name, value in saved.state_dict().items():
        found = part.restored[name]
        if torch.is_tensor(value):
            assert torch.equal(found, value), name
            assert found.dtype == value.dtype, name
        else:
            assert found == value, name


def test_parts_get_back_what_is_theirs():
    job = make_job()
    job.result.mkdir(parents=True)
    (job.result / "metrics.jsonl").touch()
    parts = {name: Walk() for name in ("actor", "critic", "act")}
    for number, part in enumerate(parts.values()):
        part.place += number
        part.moves = [number]
    list(Checkpointer(job, **parts).steps("a"))
    again = {name: Walk() for name in parts}
    Checkpointer(job, **again)
    assert {name: (part.place.tolist(), part.moves) for name, part in again.items()} == {
        "actor": ([0.0] * 3, [0]),
        "critic": ([1.0] * 3, [1]),
        "act": ([2.0] * 3, [2]),
    }


@pytest.mark.parametrize(("save_steps", "kept"), [(1, [7, 8]), (3, [3, 6]), (5, [5]), (9, [])])
def test_states_are_saved_each_save_steps_and_the_last_two_are_kept(save_steps, kept):
    walk(job := make_job(save_steps))
    assert states(job) == kept


def test_a_state_is_there_as_soon_as_the_next_step_begins():
    job, found = make_job(save_steps=3), {}
    walk(
        job, at={step: (lambda step=step: found.update({step: states(job)})) for step in (3, 4, 7)}
    )
    assert found == {3: [], 4: [3], 7: [3, 6]}


def test_a_run_that_goes_on_saves_at_the_same_steps():
    stop(make_job(save_steps=3), 4)
    walk(job := make_job(save_steps=3))
    assert states(job) == [4, 6]


def slow(clock, seconds):
    """A part whose state takes a while to save."""
    part = Walk()
    part.saved = []

    def when_saved():
        part.saved.append(len(part.moves))
        clock.now += seconds

    part.when_saved = when_saved
    return part


def takes(clock, seconds, steps):
    """What makes each step take a while."""

    def wait():
        clock.now += seconds

    return dict.fromkeys(range(1, steps + 1), wait)


def test_saving_takes_a_twentieth_of_the_time_at_most(clock):
    part = slow(clock, 1)
    walk(make_job(), steps=100, at=takes(clock, 1, 100), part=part)
    # The first takes from 1 to 2: 20 seconds go by before the next, which so comes at 22.
    assert part.saved == [1, 21, 41, 61, 81]
    assert len(part.saved) / clock.now < 0.05


def test_a_wait_ends_at_the_next_step_that_is_due(clock):
    part = slow(clock, 1)
    walk(make_job(save_steps=8), steps=48, at=takes(clock, 1, 48), part=part)
    # From 8 to 9; 29 is reached after step 28, from 33 to 34 after step 32.
    assert part.saved == [8, 32]


def test_a_wait_is_as_long_as_the_last_saving_asks_for(clock):
    part = slow(clock, 0.1)
    walk(make_job(), steps=20, at=takes(clock, 1.1, 20), part=part)
    assert part.saved == list(range(1, 21, 2))


def test_who_asks_to_stop_does_not_wait(clock):
    part = slow(clock, 1)
    stop(job := make_job(), 5, part=part)
    assert part.saved == [1, 5]
    assert states(job) == [1, 5]


def flip(position):
    """A function that flips a bit of a file."""

    def damage(path):
        content = bytearray(path.read_bytes())
        content[position] ^= 4
        path.write_bytes(content)

    return damage


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def edit(path):
    path.write_text(path.read_text().replace('"step": 6', '"step": 5'))


def delete(path):
    path.unlink()


DAMAGES = [
    ("tensors.safetensors", flip(3)),
    ("tensors.safetensors", flip(-1)),
    ("tensors.safetensors", flip(-3000)),
    ("tensors.safetensors", cut),
    ("tensors.safetensors", empty),
    ("tensors.safetensors", delete),
    ("values.json", edit),
    ("values.json", cut),
    ("values.json", delete),
    ("metrics.jsonl", edit),
    ("metrics.jsonl", cut),
    ("metrics.jsonl", delete),
    ("files.json", flip(40)),
    ("files.json", cut),
    ("files.json", empty),
    ("files.json", delete),
]


def damage(state, name, how):
    before = (state / name).read_bytes()
    how(state / name)
    assert how is delete or (state / name).read_bytes() != before


@pytest.mark.parametrize(("name", "how"), DAMAGES)
def test_a_damaged_state_is_left_and_the_one_before_used(name, how, expected, capsys):
    with pytest.raises(KilledError):
        walk(job := make_job(save_steps=3), at={7: kill})
    assert states(job) == [3, 6]
    damage(job.states / "00000006/0-of-1", name, how)
    capsys.readouterr()
    job = make_job(save_steps=100)
    assert outcome(job) == expected
    assert job.record["resumed_after_step"] == 3
    assert capsys.readouterr().err == (
        f"warning: {job.states}/00000006 is damaged and ignored\nresuming after step 3\n"
    )
    assert states(job) == [3]


def test_a_state_with_a_file_that_is_not_its_own_is_damaged(expected):
    with pytest.raises(KilledError):
        walk(job := make_job(save_steps=3), at={7: kill})
    (job.states / "00000006/0-of-1/tensors.safetensors.1").touch()
    job = make_job()
    assert outcome(job) == expected
    assert job.record["resumed_after_step"] == 3


def test_where_all_states_are_damaged_a_run_starts_from_the_beginning(expected, capsys):
    with pytest.raises(KilledError):
        walk(job := make_job(save_steps=3), at={7: kill})
    damage(job.states / "00000003/0-of-1", "tensors.safetensors", flip(-1))
    damage(job.states / "00000006/0-of-1", "files.json", delete)
    part, done = walk(job)
    assert done == list(range(1, STEPS + 1))
    assert (
        (job.result / "metrics.jsonl").read_bytes(),
        part.place.tolist(),
        part.moves,
    ) == expected
    assert job.record["resumed_after_step"] == 0
    warnings = capsys.readouterr().err.splitlines()
    assert [line.split(" is damaged")[0][-8:] for line in warnings] == ["00000006", "00000003"]


def test_a_state_that_was_being_saved_is_no_state(expected, capsys):
    # A kill before the folder has its name.
    with pytest.raises(KilledError):
        walk(job := make_job(save_steps=3), at={7: kill})
    shutil.copytree(job.states / "00000006", job.states / ".tmp")
    (job.states / ".tmp/something else").touch()
    capsys.readouterr()
    job = make_job()
    assert outcome(job) == expected
    assert job.record["resumed_after_step"] == 6
    assert capsys.readouterr().err == "resuming after step 6\n"
    # Nothing of it is in the states that come after it.
    assert states(job) == [7, 8]
    assert all(
        checkpointing.is_undamaged(path / "0-of-1")
        for path in checkpointing.checkpoints(job.states)
    )
    assert not (job.states / ".tmp").exists()


@pytest.mark.parametrize("broken", ["save_file", "result_files"])
def test_a_run_that_breaks_while_it_saves_keeps_the_states_before(broken, monkeypatch, expected):
    calls = itertools.count(1)
    works = getattr(checkpointing, broken)

    def breaks(*arguments):
        works(*arguments)
        if next(calls) == 3:
            raise OSError(28, "No space left on device")
        return works(*arguments)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(checkpointing, broken, breaks)
        walk(job := make_job(save_steps=2))
    assert states(job) == [2, 4]
    assert outcome(make_job()) == expected


@pytest.mark.parametrize("which", SIGNALS)
def test_a_run_that_is_asked_to_stop_saves_and_ends(which):
    said = stop(job := make_job(save_steps=100), 4, which)
    assert said == (f"stopped by {which.name} after step 4: run the same command again to resume")
    assert states(job) == [4]
    assert (job.states / "00000004/0-of-1/metrics.jsonl").read_text().count("\n") == 4


def test_a_run_that_is_asked_to_stop_finishes_its_step_first():
    done = []
    with pytest.raises(SystemExit):
        walk(make_job(), at={3: lambda: (send(signal.SIGTERM)(), done.append(3))})
    assert done == [3]


def test_a_run_that_is_asked_to_stop_between_steps_does_one_more():
    job = make_job(save_steps=100)
    job.result.mkdir(parents=True)
    (job.result / "metrics.jsonl").touch()

    def batches():
        for number in range(4):
            if number == 2:
                send(signal.SIGTERM)()
            yield number

    with pytest.raises(SystemExit, match="after step 3:"):
        list(Checkpointer(job, walk=Walk()).steps(batches()))
    assert states(job) == [3]


@pytest.mark.parametrize("step", [2, STEPS])
def test_handlers_are_put_back_when_a_run_is_stopped(step, handlers):
    stop(make_job(), step)
    assert [signal.getsignal(which) for which in SIGNALS] == [handlers] * 2


def test_handlers_are_put_back_when_a_run_ends_or_breaks(handlers):
    walk(make_job())
    assert [signal.getsignal(which) for which in SIGNALS] == [handlers] * 2
    with pytest.raises(KilledError):
        walk(make_job(seed=2), at={3: kill})
    assert [signal.getsignal(which) for which in SIGNALS] == [handlers] * 2


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("then", SIGNALS)
def test_more_signals_while_a_state_is_saved_do_it_no_harm(first, then, expected):
    part = Walk()
    part.when_saved = send(then, then)
    said = stop(job := make_job(save_steps=100), 3, first, part=part)
    assert said.startswith(f"stopped by {first.name} after step 3:")
    assert states(job) == [3]
    assert outcome(make_job()) == expected


def test_a_signal_while_a_state_is_saved_ends_the_run_behind_it(expected):
    part = Walk()
    part.when_saved = send(signal.SIGTERM)
    with pytest.raises(SystemExit, match="stopped by SIGTERM after step 6:"):
        walk(job := make_job(save_steps=6), part=part)
    assert states(job) == [6]
    assert outcome(make_job()) == expected


@pytest.mark.parametrize(
    "changes", [{"seed": 2}, {"made_from": "1"}, {"name": "small"}, {"rule": "train_reward"}]
)
def test_a_state_of_another_spec_or_other_inputs_is_not_found(changes):
    stop(make_job(seed=1), 3)
    other = make_job(**{"seed": 1, **changes})
    _, done = walk(other)
    assert done == list(range(1, STEPS + 1))
    # And it stays for the run that it belongs to.
    assert walk(make_job(seed=1))[1] == list(range(4, STEPS + 1))


def test_a_state_is_found_under_another_placement():
    stop(make_job(save_steps=2), 3)
    assert walk(make_job(save_steps=5))[1] == list(range(4, STEPS + 1))


@pytest.fixture
def program(monkeypatch):
    """A function that runs a whole program whose loop is that of walk."""
    path = ROOT / "scripts/train_sft.py"
    # The process that has it is this one, and lives on.
    monkeypatch.setattr("snakechat.workflow.job.acquire_lock", lambda path: None)

    def start(main, save_steps=2):
        spec = {**make_job().spec, "code": code_digests(path)}
        Path("spec.json").write_text(json.dumps(spec))
        placement = json.dumps({"save_steps": save_steps})
        monkeypatch.setattr(
            sys, "argv", [str(path), "--spec", "spec.json", "--placement", placement]
        )
        run(main)

    return start


def test_a_program_goes_on_where_it_was_stopped_and_tells_its_record(program, expected, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        program(lambda job: walk(job, at={5: send(signal.SIGTERM)}))
    assert stopped.value.code.startswith("stopped by SIGTERM after step 5:")
    target = tmp_path / "output/sft/tiny"
    assert not target.exists()
    program(walk)
    assert (target / "metrics.jsonl").read_bytes() == expected[0]
    record = json.loads((tmp_path / "output/sft/tiny.run.json").read_text())
    assert record["resumed_after_step"] == 5


def test_a_published_result_leaves_no_state(program, tmp_path):
    states_in = []
    program(lambda job: states_in.append((walk(job), states(job))[1]))
    assert states_in == [[6, 8]]
    assert not list((tmp_path / "output/state").rglob("*.safetensors"))
    record = json.loads((tmp_path / "output/sft/tiny.run.json").read_text())
    assert record["resumed_after_step"] == 0


def test_a_program_stopped_behind_its_last_step_only_saves_its_model(program, expected, tmp_path):
    def breaks(job):
        walk(job)
        raise KilledError

    with pytest.raises(KilledError):
        program(breaks)
    done = []
    program(lambda job: done.extend(walk(job)[1]))
    assert done == []
    assert (tmp_path / "output/sft/tiny/metrics.jsonl").read_bytes() == expected[0]


def test_ctrl_c_outside_the_loop_is_told_in_one_line(program):
    def interrupted(job):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        program(interrupted)
    assert stopped.value.code == "stopped by SIGINT"


def test_generators_of_devices_that_are_not_here_are_left_out():
    generators = checkpointing.Generators()
    state = generators.state_dict()
    assert "cpu" in state
    drawn = torch.rand(4)
    generators.load_state_dict({**state, "another": SimpleNamespace()})
    assert torch.equal(torch.rand(4), drawn)
