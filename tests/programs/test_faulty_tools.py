"""accept.py and store.py that are killed at any change of a file."""

import os
import shutil
from itertools import count
from pathlib import Path

import pytest

from snakechat.workflow.links import link_result, linked_folder
from snakechat.workflow.manifest import STORE, read_manifest
from snakechat.workflow.store import result_damage, stored_folders
from support.faults import running
from support.stored_results import make_result

RESULT = Path("output/sft/tiny")
# Accepts RESULT for a spec with other code, as accept.py does after it has planned.
ACCEPT = """
import copy, sys
import accept
from pathlib import Path
from types import SimpleNamespace
from snakechat.jobs.planner import Plan
from snakechat.workflow.manifest import manifest_path, read_manifest
from snakechat.workflow.processes import DEFAULTS

path = Path("output/sft/tiny")
manifest = read_manifest(manifest_path(path))
spec = copy.deepcopy(manifest["spec"]) | {"name": "tiny", "path": str(path)}
spec["code"] = {"scripts/train_sft.py": "other"}
job = SimpleNamespace(spec=spec, options=DEFAULTS)
accept.plan_build = lambda words: Plan({}, {spec["path"]: job}, [str(path)])
sys.argv = ["accept.py", str(path), "--because", "equal"]
accept.main()
"""
GC = """
import sys
import store

sys.argv = ["store.py", "gc", "--max-size", "0"]
store.main()
"""


@pytest.fixture
def run(scratch, tmp_path):
    """Run programs next to `before`, an output folder with three versions of a result."""
    with running(scratch, tmp_path, "accept", "store") as run:
        Path("accept_one.py").write_text(ACCEPT)
        Path("collect.py").write_text(GC)
        for number in range(3):
            link_result(RESULT, make_result(STORE, epochs=number))
        # A collection keeps what was used in the last seconds.
        for folder in stored_folders(STORE):
            os.utime(folder, (0, 0))
        shutil.copytree("output", "before", symlinks=True)
        yield run


def killed(run, program):
    """Run a program in a copy of the folder, killed at each change, and then to its end.

    Yields its first exit code. Each result is whole then.
    """
    for number in count(1):
        shutil.rmtree("output", ignore_errors=True)
        shutil.copytree("before", "output", symlinks=True)
        Path("log").unlink(missing_ok=True)
        code, _ = run(program, kind="kill", at=number, log="log")
        assert not any(map(result_damage, stored_folders(STORE)))
        yield code
        code, output = run(program)
        assert code == 0, (number, output)
        if number > len(Path("log").read_text().splitlines()):
            assert number > 5
            return


def contents():
    """Return the bytes of the result."""
    return {path.name: path.read_bytes() for path in RESULT.rglob("*") if path.is_file()}


def test_a_result_is_accepted_as_a_whole_or_not(run):
    assert run("accept_one.py")[0] == 0
    expected = contents()
    for code in killed(run, "accept_one.py"):
        manifest = read_manifest(RESULT.with_name("tiny.manifest.json"))
        assert ("accepted" in manifest) or code != 0
        assert (RESULT / "model").read_text() == "weights"
    assert contents() == expected


def test_a_collection_removes_whole_results(run):
    assert list(killed(run, "collect.py"))
    assert [folder.resolve() for folder in stored_folders(STORE)] == [linked_folder(RESULT)]
