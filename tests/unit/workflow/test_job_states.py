"""The states of jobs from the files of a build."""

import json
import os
import platform
from pathlib import Path

import pytest

from snakechat.workflow.job_states import job_states, last_error
from snakechat.workflow.manifest import content_digest
from snakechat.workflow.specs import write_spec

HERE = f"process {os.getpid()} on {platform.node()}\n"
ELSEWHERE = "process 1 on another-host\n"


def make_spec(name, **inputs):
    """A spec with inputs by key."""
    spec = {"rule": "make", "name": name, "path": f"output/made/{name}", "settings": {}}
    entries = {
        key: {"rule": "make", "name": other, "path": f"output/made/{other}"}
        for key, other in inputs.items()
    }
    return {**spec, "inputs": entries, "files": {}, "code": {}, "requirements": {}}


class Build:
    """The folder output/ of a build of b from a."""

    def __init__(self, folder):
        self.root = folder / "output"
        (self.root / "made").mkdir(parents=True)
        (self.root / "logs/make").mkdir(parents=True)
        self.specs = {"a": make_spec("a"), "b": make_spec("b", source="a")}
        for spec in self.specs.values():
            write_spec(spec, self.root / "specs")

    def finish(self, name, content="", **inputs):
        """Write the manifest of a result; return it."""
        files = {"text": {"size": len(content), "sha256": content}}
        manifest = {"spec": self.specs[name], "inputs": inputs, "lineage": {}, "facts": {}}
        manifest["files"] = files
        (self.root / f"made/{name}.manifest.json").write_text(json.dumps(manifest))
        return manifest

    def lock(self, name, holder):
        path = self.root / f"made/.{name}.lock"
        path.write_text(holder)
        return path

    def states(self):
        found = job_states(self.root, [("make", "b", "output/made/b"), ("make", "x", "output/x")])
        return {job.name: job.state for job in found}


@pytest.fixture
def build(tmp_path):
    return Build(tmp_path)


def test_a_result_from_an_earlier_input_waits(build):
    assert build.states() == {"a": "waits", "b": "waits"}
    build.finish("b", source=content_digest(build.finish("a", "1")))
    assert build.states() == {"a": "finished", "b": "finished"}
    build.finish("a", "2")
    assert build.states() == {"a": "finished", "b": "waits"}
    # With the lock that its last run has left.
    build.lock("b", "process 99999999 on " + platform.node() + "\n")
    assert build.states()["b"] == "waits"


def test_a_new_spec_makes_a_result_wait(build):
    build.finish("a")
    newer = Path(write_spec(build.specs["a"] | {"settings": {"n": 1}}, build.root / "specs"))
    later = newer.stat().st_mtime + 5
    os.utime(newer, (later, later))
    assert build.states()["a"] == "waits"


def test_a_job_runs_while_its_process_does(build):
    lock = build.lock("a", HERE)
    assert build.states()["a"] == "running"
    # Of a run before this spec: another process may have the number.
    os.utime(lock, (0, 0))
    assert build.states()["a"] == "waits"


def test_a_job_on_another_host_runs_until_its_log_has_an_error(build):
    build.lock("a", ELSEWHERE)
    (build.root / "made/.a.tmp").mkdir()
    assert build.states()["a"] == "running"
    (build.root / "logs/make/a.log").write_text("bar\rerror: no space\n")
    assert build.states()["a"] == "failed"


def test_a_damaged_spec_is_no_job(build):
    [path] = (build.root / "specs/make").glob("b-*")
    path.write_text("{")
    assert build.states() == {}


def test_the_last_error_of_a_log_is_no_progress_bar(tmp_path):
    log = tmp_path / "log"
    assert last_error(log) == ""
    log.write_text("note: a\n\rtrain: 5%| 1/2 [00:01<00:01]")
    assert last_error(log) == ""
    log.write_text("error: b\nlater\n")
    assert last_error(log) == "error: b"
    log.write_text("x" * 100_000 + "\nValueError: c\n")
    assert last_error(log) == "ValueError: c"
