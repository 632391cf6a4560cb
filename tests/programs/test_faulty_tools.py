"""accept.py and cache.py that are killed or find a full or broken disk at any change of a file."""

import json
import shutil
from itertools import count
from pathlib import Path

import pytest

from conftest import ROOT
from snakechat.workflow.manifest import read_manifest
from snakechat.workflow.result_cache import ResultCache
from support.cached_results import make_result
from support.faults import ERRORS, KINDS, compile_faults, working

RESULT, CACHE = Path("output/sft/tiny"), Path("output/cache")
# Accepts RESULT for a spec with other code, as accept.py does after it has planned.
ACCEPT = """
import copy, sys
import accept
from pathlib import Path
from snakechat.planning.plan import Plan, PlannedJob
from snakechat.workflow.manifest import manifest_path, read_manifest

path = Path("output/sft/tiny")
manifest = read_manifest(manifest_path(path))
spec = copy.deepcopy(manifest["spec"])
spec["code"] = {"scripts/train_sft.py": "other"}
job = PlannedJob(spec, {"cache": "output/cache", "cache_max_bytes": None})
accept.plan_build = lambda targets, options: Plan({spec["path"]: job}, {spec["path"]})
sys.argv = ["accept.py", str(path), "--because", "equal"]
accept.main()
"""
GC = """
import sys
import cache

sys.argv = ["cache.py", "gc", "--max-size", "0", "--cache", "output/cache"]
cache.main()
"""


@pytest.fixture
def worker(scratch, tmp_path, monkeypatch):
    """A worker next to `before`, an output folder with a result, which the cache has too."""
    library = compile_faults(tmp_path)
    folder = scratch / tmp_path.name
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("accept_one.py").write_text(ACCEPT)
    Path("collect.py").write_text(GC)
    files = {"model": "weights", "README.md": "# tiny\n"}
    for number in range(3):
        shutil.rmtree(RESULT, ignore_errors=True)
        key = make_result(RESULT, files, epochs=number)
        ResultCache(CACHE, None).put(key, RESULT)
    Path("output").rename("before")
    with working(library, "accept", "cache", path=ROOT / "scripts") as worker:
        yield worker
    shutil.rmtree(folder)


def contents():
    """Return the bytes of the result and of its manifest."""
    paths = [RESULT.with_name("tiny.manifest.json"), *RESULT.rglob("*")]
    return {path: path.read_bytes() for path in paths if path.is_file()}


def faults(worker, program, kind):
    """Run a program in a copy of the folder with a fault at each change.

    Yields its exit code and output; the program runs again afterwards.
    """
    for number in count(1):
        shutil.rmtree("output", ignore_errors=True)
        # Hard links between the result and the cache are broken: entries use space of their own.
        shutil.copytree("before", "output")
        Path("log").unlink(missing_ok=True)
        yield worker.run(program, kind=kind, at=number, log="log")
        code, output = worker.run(program)
        assert code == 0, (number, output)
        if number > len(Path("log").read_text().splitlines()):
            assert number > 5
            return


def check_message(code, output, kind):
    """Check that a program ended, was killed, or failed with one line."""
    if kind == "kill" or code == 0:
        assert "Traceback" not in output
    else:
        *_, line = output.splitlines()
        assert code == 1 and line.startswith("error: ") and ERRORS[kind] in line, output
        assert "Traceback" not in output, output


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_is_accepted_as_a_whole_or_not(worker, kind):
    shutil.copytree("before", "output")
    assert worker.run("accept_one.py")[0] == 0
    expected = contents()
    for code, output in faults(worker, "accept_one.py", kind):
        check_message(code, output, kind)
        manifest = read_manifest(RESULT.with_name("tiny.manifest.json"))
        assert ("accepted" in manifest) or code != 0
        assert (RESULT / "model").read_text() == "weights"
        assert ResultCache(CACHE, None).verify() == []
    assert contents() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_collection_removes_whole_entries(worker, kind):
    for code, output in faults(worker, "collect.py", kind):
        check_message(code, output, kind)
        cache = ResultCache(CACHE, None)
        assert cache.verify() == []
        assert all(entry.path == str(RESULT) for entry in cache.entries())
    assert cache.entries() == []
    assert json.loads(RESULT.with_name("tiny.manifest.json").read_text())["spec"]
