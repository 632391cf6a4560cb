"""Builds that are killed, stopped or crossed by others: the same command, the same bytes."""

import contextlib
import fcntl
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import ROOT, Workflow, copy_sources
from snakechat.workflow.digests import file_digest

# Jobs and their results, each behind those that it is made from.
JOBS = {
    "import_dataset": "data/toy",
    "tokenize_sft": "tokens/sft/tiny",
    "train_sft": "sft/tiny",
    "train_reward": "reward/tiny",
    "train_dpo": "dpo/tiny",
    "train_rlhf": "rlhf/tiny",
}

# How far a job came: of the files that a run has touched, the last one tells.
TRACES = {
    ".{name}.lock": "as the program begins",
    ".{name}.tmp/metrics.jsonl": "in the loop",
    "state": "while a state is saved",
    ".{name}.tmp/manifest.json": "in publishing",
    "{name}": "in publishing",
    "{name}.manifest.json": "after publishing",
}
PUBLISHING = ("in publishing", "after publishing")
WRITING = ("while a state is saved", *PUBLISHING)

# Runs a program that kills itself just before the Nth time that it changes something in output/.
KILLER = """
import os, runpy, signal, sys

left, program = int(sys.argv[1]), sys.argv[2]
del sys.argv[:2]
sys.path[0] = os.path.dirname(program)
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")

def count_down(event, arguments):
    global left
    is_written = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if (is_written or event in CHANGES) and "output/" in str(arguments[0]):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count_down)
runpy.run_path(program, run_name="__main__")
"""


def is_touched(path, since):
    """Whether a file is there and was written at a time or later."""
    try:
        return path.stat().st_mtime >= since
    except FileNotFoundError:
        return False


class Result:
    """A job's result in the tree of a workflow."""

    def __init__(self, workflow, job):
        self.workflow, self.job = workflow, job
        self.output = workflow.folder / "output"
        self.folder = self.output / JOBS[job]
        self.manifest = self.folder.with_name(f"{self.folder.name}.manifest.json")
        self.record = self.folder.with_name(f"{self.folder.name}.run.json")
        self.target = self.manifest.relative_to(workflow.folder).as_posix()

    def spoil(self, leave_folder=False):
        """Delete the result, or leave a folder that is not whole, so that the job has to run."""
        self.manifest.unlink()
        self.record.unlink()
        if leave_folder:
            (self.folder / "manifest.json").write_text("")
        else:
            shutil.rmtree(self.folder)

    def trace(self, pattern):
        """A file beside the result, by its pattern; of saving, the state that is not yet whole."""
        if pattern == "state":
            found = self.output.glob(f"state/{self.job}/*/*/.tmp")
            return next(found, self.output / "state/none")
        return self.folder.parent / pattern.format(name=self.folder.name)

    def progress(self, since):
        """How far the job came that was started at a time."""
        reached = "before the program"
        for pattern, place in TRACES.items():
            if is_touched(self.trace(pattern), since):
                reached = place
        return reached

    def steps(self, since):
        """Steps in the figures of a training that was started at a time."""
        figures = self.trace(".{name}.tmp/metrics.jsonl")
        return figures.read_text().count("\n") if is_touched(figures, since) else 0

    def files(self):
        """Digest of each file of the result and of its manifest."""
        paths = [self.manifest, *self.folder.rglob("*")]
        return {str(p.relative_to(self.output)): file_digest(p) for p in paths if p.is_file()}

    def neighbours(self):
        """All that lies beside the result: locks, results of other jobs, what was left behind."""
        return {path.name for path in self.folder.parent.iterdir()}

    def check(self, uninterrupted):
        """Check that it is all as in another tree, with nothing left over."""
        assert self.files() == uninterrupted.files()
        assert self.neighbours() == uninterrupted.neighbours()
        assert not list(self.output.glob(f"state/{self.job}/*"))
        assert not list(self.workflow.folder.glob(".snakemake/locks/*"))

    def check_all(self, uninterrupted):
        """Check that, and that no job of the tree has anything to do."""
        self.check(uninterrupted)
        targets = [Result(self.workflow, job).target for job in JOBS]
        assert self.workflow.planned(*targets) == set()


class Build:
    """Snakemake at work, in a process group of its own; its output goes into a file."""

    def __init__(self, workflow, target):
        self.log = workflow.folder / "build.log"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.started = time.time()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["snakemake", target, "--cores", "2", *workflow.options],
                cwd=workflow.folder,
                env={**os.environ, "PATH": path},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def age(self):
        """Seconds since the start."""
        return time.time() - self.started

    def runs(self):
        return self.process.poll() is None

    def wait_until(self, condition):
        """Wait for something to happen, for as long as Snakemake runs."""
        while self.runs() and not condition():
            time.sleep(0.002)

    def send(self, number):
        """Send a signal to the whole group: to Snakemake, the shells and the programs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self):
        """Wait for the end; returns the exit status and what was said."""
        return self.process.wait(), self.log.read_text()


@contextlib.contextmanager
def started(workflow, target):
    """A build that is killed with all its programs at the end of the block, if it still runs."""
    build = Build(workflow, target)
    try:
        yield build
    finally:
        build.send(signal.SIGKILL)
        build.process.wait()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A workflow with all results, uninterrupted, and how many seconds each job's command took."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    copy_sources(folder)
    files = [str(ROOT / "tests" / name) for name in ("quick.yaml", "kill.yaml")]
    workflow = Workflow(folder, "--configfile", *files)
    seconds = {}
    for job in JOBS:
        target = Result(workflow, job).target
        workflow.build(target, "--omit-from", job)
        start = time.time()
        workflow.build(target)
        seconds[job] = time.time() - start
    return workflow, seconds


@pytest.fixture
def kills(request):
    """How often each job is killed."""
    return request.config.getoption("--kills")


@pytest.fixture
def tree(built, tmp_path):
    """A copy of that workflow."""
    workflow, _ = built
    return workflow.copy(tmp_path / "tree")


@pytest.mark.parametrize("job", JOBS)
def test_job_that_is_killed_again_and_again_comes_to_the_same_bytes(tree, built, job, kills):
    uninterrupted, seconds = built
    wanted, result, life = Result(uninterrupted, job), Result(tree, job), seconds[job]
    draw = random.Random(f"{job} {kills}")
    # One moment in each part of the command's life. Every second kill waits from there until
    # something is written, which takes too little time to be hit by chance.
    aims = itertools.cycle([None, WRITING, None, PUBLISHING])
    moments = [((part + draw.random()) / kills, next(aims)) for part in range(kills)]

    def run_until(moment, aim):
        """Run the command, killed at a moment of its life if it still runs."""
        with started(tree, result.target) as build:
            build.wait_until(lambda: build.age >= moment)
            if aim:
                build.wait_until(lambda: result.progress(build.started) in aim)
                time.sleep(draw.expovariate(200))
            age = build.age
        status, said = build.end()
        print(f"{job}: {age:.2f} of {life:.2f} s: {status}, {result.progress(build.started)}")
        assert status in (0, -signal.SIGKILL), said[-5000:]
        return status == -signal.SIGKILL, age

    result.spoil(leave_folder=True)
    is_whole_life = True
    while moments:
        share, aim = moments[0]
        was_killed, age = run_until(share * life, aim)
        if was_killed:
            moments.pop(0)
            is_whole_life = False
            continue
        # Quicker than its kill: another build of the same result.
        result.check_all(wanted)
        if is_whole_life:
            life = min(life, age)
            moments[0] = (share * 0.95, aim)
        result.spoil(leave_folder=draw.random() < 0.5)
        is_whole_life = True

    tree.build(result.target)
    result.check_all(wanted)


def test_program_that_is_killed_before_any_change_of_a_file_leaves_nothing_behind(tree, built):
    wanted, result = Result(built[0], "import_dataset"), Result(tree, "import_dataset")
    spec = next(result.output.glob("specs/import_dataset/*.json"))
    command = ("scripts/import_dataset.py", "--spec", str(spec))
    for change in itertools.count(1):
        result.spoil(leave_folder=True)
        killed = tree.run("python", "-c", KILLER, str(change), *command)
        again = tree.run("python", *command)
        assert again.returncode == 0, again.stdout
        result.check(wanted)
        if killed.returncode != -signal.SIGKILL:
            break
    assert killed.returncode == 0, killed.stdout
    assert change > 10


def wait_for_program(result):
    """Wait until the process ends that makes a result."""
    with result.trace(".{name}.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def test_program_that_outlives_snakemake_is_not_disturbed_by_the_same_command(tree, built):
    wanted, result = Result(built[0], "train_sft"), Result(tree, "train_sft")
    result.spoil()
    with started(tree, result.target) as orphaned:
        orphaned.wait_until(lambda: result.steps(orphaned.started) > 1)
        orphaned.process.kill()
        maker = result.trace(".{name}.lock").read_text().strip()
        program = int(maker.split()[1])
        # Long enough for the same command to meet it.
        os.kill(program, signal.SIGSTOP)
        refused = tree.snakemake(result.target, "--cores", "2")
        os.kill(program, signal.SIGCONT)
        assert refused.returncode == 1
        assert refused.stdout.count(f"error: output/sft/tiny is being made by {maker}: wait") == 1
        assert "MissingOutputException" not in refused.stdout
        wait_for_program(result)
    tree.build(result.target)
    result.check_all(wanted)


def test_program_and_the_same_command_started_before_it_ends_give_the_same_bytes(tree, built):
    wanted, result = Result(built[0], "train_sft"), Result(tree, "train_sft")
    result.spoil()
    with started(tree, result.target) as orphaned:
        log = result.output / "logs/train_sft/tiny.log"
        orphaned.wait_until(lambda: is_touched(log, orphaned.started))
        orphaned.process.kill()
        again = tree.snakemake(result.target, "--cores", "2")
        assert again.returncode == 0 or "output/sft/tiny is being made by process" in again.stdout
        wait_for_program(result)
    tree.build(result.target)
    result.check_all(wanted)


def test_training_that_is_asked_to_stop_says_where_and_goes_on_from_there(tree, built):
    wanted, result = Result(built[0], "train_rlhf"), Result(tree, "train_rlhf")
    result.spoil()
    step = 0
    for name in ("SIGTERM", "SIGINT"):
        with started(tree, result.target) as build:
            build.wait_until(lambda last=step: result.steps(build.started) > last + 1)
            build.send(signal.Signals[name])
            status, said = build.end()
        assert status > 0
        told = re.findall(
            rf"stopped by {name} after step (\d+): run the same command again to resume", said
        )
        assert len(told) == 1, said[-5000:]
        assert int(told[0]) > step
        step = int(told[0])
    tree.build(result.target)
    result.check_all(wanted)
    assert json.loads(result.record.read_text())["resumed_after_step"] == step


def test_build_is_disturbed_neither_by_a_second_one_nor_by_dry_runs(tree, built):
    results = [Result(tree, job) for job in ("tokenize_sft", "train_sft")]
    for result in results:
        result.spoil()
    target = results[-1].target
    with started(tree, target) as first:
        first.wait_until(lambda: "Tokenizing" in first.log.read_text())
        second = tree.snakemake(target, "--cores", "2")
        assert first.runs()
        assert second.returncode == 1
        errors = [line for line in second.stdout.splitlines() if "error" in line.lower()]
        assert len(errors) == 1, second.stdout
        assert errors[0].startswith(f"error: process {first.process.pid} on ")
        assert errors[0].endswith(f" is building in {tree.folder}: wait for it, or stop it")
        while first.runs():
            tree.planned(target)
            tree.planned(target, "--config", "seed=7")
        status, said = first.end()
    assert status == 0, said[-5000:]
    for result in results:
        result.check_all(Result(built[0], result.job))
