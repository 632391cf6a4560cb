"""Faults at any change of a file: a full or broken disk, a kill.

A failure is one line, no result is lost or wrong, and no complete work is repeated.
"""

import json
import shutil
from itertools import count
from pathlib import Path

import pytest

from snakechat.workflow.manifest import read_manifest
from snakechat.workflow.store import result_damage, stored_folders, work_path
from support.faults import ERRORS, KINDS, running

pytestmark = pytest.mark.slow

# Writes two files, and counts how often it does so. It is launched in its own process.
PROGRAM = """
import sys

from snakechat.workflow import code_digests, job as jobs, publishing
from snakechat.workflow.processes import DEFAULTS, SERIAL

# They take most of the time, and write nothing.
code_digests.Modules.code = lambda *_: code_digests.Code({}, frozenset(), frozenset())
publishing.limits_of = lambda *_: {}

def main(job):
    (job.result / "text").write_text(job.settings.text)
    (job.result / "deep").mkdir()
    (job.result / "deep/more").write_text(job.settings.text)
    with open("runs", "a") as file:
        file.write(".")

def launch(_):
    job = publishing.prepare("spec.json", sys.argv[0], SERIAL, DEFAULTS)
    if job:
        jobs.run(main)
        publishing.publish_result(job, 0.0)

if __name__ == "__main__":
    jobs.report_errors(launch, "spec.json")
"""

RESULT, STORE = Path("output/made/one"), Path("output/store")


@pytest.fixture
def build(scratch, tmp_path):
    """A function that runs the program for a text, with a fault or not.

    Before it, one result was made from the text `old`, and another one from `new`.
    """

    def run_for(text, **named):
        spec = {"rule": "make", "name": "one", "path": str(RESULT), "inputs": {}}
        spec |= {"files": {}, "requirements": {}, "code": {}, "settings": {"text": text}}
        Path("spec.json").write_text(json.dumps(spec))
        return run("scripts/make.py", "--spec", "spec.json", **named)

    with running(scratch, tmp_path, "snakechat.workflow.publishing") as run:
        Path("scripts").mkdir()
        Path("scripts/make.py").write_text(PROGRAM)
        for text in ("new", "old"):
            assert run_for(text) == (0, "")
            Path("output").rename(text)
        yield run_for


def start_over(has_new):
    """Bring back the old result; the store may have the new one too, without a link."""
    shutil.rmtree("output", ignore_errors=True)
    shutil.copytree("old", "output", symlinks=True)
    if has_new:
        shutil.copytree("new/store", STORE, dirs_exist_ok=True)


def contents(folder):
    """Return the bytes of the files of a result."""
    made = Path(folder, "made/one")
    return {
        path.relative_to(made): path.read_bytes()
        for path in made.glob("**/*")
        if path.is_file() and path.name != "run.json"
    }


def complete_texts():
    """Return the texts of the undamaged results, published or not."""
    unfinished = [work_path(each, "result") for each in stored_folders(STORE, is_finished=False)]
    folders = [*stored_folders(STORE), *unfinished]
    return {(folder / "text").read_text() for folder in folders if not result_damage(folder)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_new", [False, True])
def test_a_fault_at_any_change_loses_nothing(build, has_new, kind):
    expected, failures = contents("new"), 0
    for number in count(1):
        start_over(has_new)
        Path("log").unlink(missing_ok=True)
        code, output = build("new", kind=kind, at=number, log="log")
        texts, runs = complete_texts(), Path("runs").stat().st_size
        assert "old" in texts, f"{number}: the old result is lost"
        manifest = read_manifest(f"{RESULT}.manifest.json")
        assert manifest, f"{number}: no result is linked"
        if kind == "kill" and manifest["spec"]["settings"]["text"] == "new":
            # No build runs the job again: nothing may be left of it, apart from its lock.
            assert {path.name for path in STORE.glob("*/.*/*")} <= {"lock"}, number
        failures += code != 0
        if code == 0:
            assert contents("output") == expected, number
        elif kind != "kill":
            *lines, line = output.splitlines()
            reason = f"error: {ERRORS[kind]}: output/"
            assert code == 1 and line.startswith(reason), (number, output)
            assert not [other for other in lines if other.startswith(("error", "Trace"))], output
        again = build("new")
        assert again[0] == 0, (number, again)
        repeated = Path("runs").stat().st_size - runs
        assert repeated == (0 if "new" in texts else 1), number
        assert contents("output") == expected, number
        assert (RESULT / "run.json").exists(), number
        if number > len(Path("log").read_text().splitlines()):
            break
    assert {path.name for path in RESULT.parent.iterdir()} == {"one", "one.manifest.json"}
    assert not list(STORE.glob("*/.*"))
    assert failures >= 10
