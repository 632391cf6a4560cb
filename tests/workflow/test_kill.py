"""Killed, stopped and concurrent builds: the same command leads to the same bytes."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import time

import pytest

from conftest import ROOT, Workflow, copy_sources
from snakechat.workflow.manifest import RUN_RECORD, file_digest
from support.background_builds import started

# Jobs and their results, in topological order.
JOBS = {
    "tokenize_sft": "tokens/sft/tiny",
    "train_sft": "sft/tiny",
    "train_rlhf": "rlhf/tiny",
}

# Files that the run of a job writes, in the folder of its rule in the store.
METRICS, STATE = ".*/result/metrics.jsonl", ".*/state/*/.0-of-1"


class Result:
    """The result of a job in the folder of a workflow."""

    def __init__(self, workflow, job):
        self.workflow = workflow
        self.target = f"output/{JOBS[job]}.manifest.json"
        self.manifest = workflow.folder / self.target
        self.folder = workflow.folder / "output" / JOBS[job]
        self.stored = workflow.folder / "output/store" / job

    def delete(self, leave_folder=False):
        """Delete the result, or leave an incomplete folder, so that the job has to run."""
        if leave_folder:
            (self.folder / "manifest.json").resolve().write_text("")
        else:
            shutil.rmtree(self.stored)
        self.manifest.unlink()
        self.folder.unlink()

    def trace(self, pattern, since=0):
        """Return the path of METRICS or STATE, if it was written at or after a time."""
        with contextlib.suppress(FileNotFoundError):
            found = self.stored.glob(pattern)
            return next((path for path in found if path.lstat().st_mtime >= since), None)

    def steps(self, since):
        """Return the logged steps of the training that was started at a time."""
        metrics = self.trace(METRICS, since)
        return metrics.read_text().count("\n") if metrics else 0

    def files(self):
        """Return what is left: the digests of files of the result without the record of the run,
        and the names next to the result and its link, of locks and temporary files too."""
        paths = [path for path in self.folder.rglob("*") if path.name != RUN_RECORD]
        digests = {str(p.relative_to(self.folder)): file_digest(p) for p in paths if p.is_file()}
        return digests, {*os.listdir(self.folder.parent), *os.listdir(self.stored)}

    def check(self, uninterrupted):
        """Check that another workflow made the same result and that all is up to date."""
        assert self.files() == uninterrupted.files()
        assert not list(self.workflow.folder.glob(".snakemake/locks/*"))
        targets = [Result(self.workflow, job).target for job in JOBS]
        assert self.workflow.planned(*targets) == set()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A workflow with uninterrupted results, and the seconds that the RLHF training took."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    copy_sources(folder)
    files = [str(ROOT / "tests/configs" / name) for name in ("quick.yaml", "kill.yaml")]
    workflow = Workflow(folder, "--cores", "2", "--configfile", *files)
    target = Result(workflow, "train_rlhf").target
    workflow.build(target, "--omit-from", "train_rlhf")
    before = time.time()
    workflow.build(target)
    return workflow, time.time() - before


@pytest.fixture
def tree(built, tmp_path):
    """A copy of the built workflow."""
    workflow, _ = built
    return workflow.copy(tmp_path / "tree")


def test_a_training_that_is_killed_repeatedly_makes_the_same_bytes(tree, built, pytestconfig):
    """All programs publish by the same code, which test_publishing.py kills at each change."""
    uninterrupted, duration = built
    kills = pytestconfig.getoption("--kills")
    expected, result = (Result(workflow, "train_rlhf") for workflow in (uninterrupted, tree))
    draw, killed = random.Random(kills), 0
    result.delete(leave_folder=True)
    while killed < kills:
        with started(tree, result.target) as build:
            # A moment in the command's duration. Every second kill waits from there until a state
            # is saved, which is too short to be hit by chance.
            moment = build.started + draw.random() * duration / 2
            build.wait_until(lambda moment=moment: time.time() >= moment)
            if killed % 2:
                build.wait_until(lambda: result.trace(STATE, build.started))
                time.sleep(draw.expovariate(200))
        status, output = build.end()
        assert status in (0, -signal.SIGKILL), output[-5000:]
        killed += status == -signal.SIGKILL
        if status == 0:
            # It ended before it was killed: build the same result again.
            result.check(expected)
            result.delete(leave_folder=draw.random() < 0.5)
    tree.build(result.target)
    result.check(expected)


def test_a_training_that_receives_a_signal_saves_and_resumes(tree, built):
    expected, result = Result(built[0], "train_rlhf"), Result(tree, "train_rlhf")
    result.delete()
    step = 0
    for name in ("SIGTERM", "SIGINT"):
        with started(tree, result.target) as build:
            build.wait_until(lambda last=step: result.steps(build.started) > last + 1)
            build.send(signal.Signals[name])
            status, output = build.end()
        assert status > 0
        # The build repeats the message of its job.
        steps = set(
            re.findall(
                rf"stopped by {name} after step (\d+): run the same command again to resume", output
            )
        )
        assert len(steps) == 1, output[-5000:]
        last, step = step, int(steps.pop())
        assert step > last
    tree.build(result.target)
    result.check(expected)
    assert json.loads((result.folder / "run.json").read_text())["resumed_after_step"] == step


def test_a_second_build_stops_and_dry_runs_do_not_disturb_a_build(tree, built):
    jobs = ("tokenize_sft", "train_sft")
    results, expected = ([Result(each, job) for job in jobs] for each in (tree, built[0]))
    for result in results:
        result.delete()
    target = results[-1].target
    with started(tree, target) as first:
        first.wait_until(lambda: "Tokenizing" in first.log.read_text())
        # Suspended, so that it does not end before the second one has tried.
        first.send(signal.SIGSTOP)
        with started(tree, target, log="second.log") as second:
            assert second.end()[0] == 1
        name = f"process {first.process.pid} on "
        assert f"error: {name}" in second.log.read_text()
        first.send(signal.SIGCONT)
        while first.runs():
            tree.planned(target)
            tree.planned(target, "--config", "seed=7")
        status, output = first.end()
    assert status == 0, output[-5000:]
    for result, uninterrupted in zip(results, expected, strict=True):
        result.check(uninterrupted)
