"""store.py lists versions of results, and removes what is not needed."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import ROOT
from snakechat.workflow.digests import digest
from snakechat.workflow.manifest import read_manifest
from snakechat.workflow.store import STORE, link_result
from snakechat.workflow.store_space import stored_results
from support.specs import EMPTY_RUN
from support.stored_results import make_result

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d"
RESULT = Path("output/sft/tiny")


@pytest.fixture
def versions(tmp_path, monkeypatch):
    """Three versions of a result, the newest one in output/, and another result."""
    monkeypatch.chdir(tmp_path)
    folders = []
    for number, settings in enumerate(({"epochs": 1}, {"epochs": 2}, {"epochs": 2, "seed": 5})):
        folder = make_result(STORE, files={"model": "x" * number}, **settings)
        spec = read_manifest(folder / "manifest.json")["spec"]
        record = {"spec": digest(spec), "seconds": 60, "host": f"node{number}"}
        record["started"] = f"2026-01-0{number + 1}T12:00:00+00:00"
        (folder / "run.json").write_text(json.dumps(EMPTY_RUN | record))
        os.utime(folder, (time.time() - (10 - number) * 24 * 3600,) * 2)
        folders.append(folder)
    link_result(RESULT, folders[-1])
    make_result(STORE, "other")
    return folders


def run(*arguments):
    """Run store.py; return its exit code, and its output by lines."""
    process = subprocess.run(
        [sys.executable, ROOT / "scripts/store.py", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TZ": "UTC"},
    )
    return process.returncode, process.stdout.splitlines()


def test_results_are_listed(versions):
    code, [other, tiny, total] = run("list")
    assert code == 0
    assert re.fullmatch(rf"{TIME}           9 B     1 version   output/sft/other", other)
    assert tiny == "2026-01-03 12:01           3 B     3 versions  output/sft/tiny"
    assert total == "4 results, 12 B"


def test_versions_are_listed_with_what_changed(versions):
    assert run("list", "output/sft/tiny/") == (
        0,
        [
            "2026-01-03 12:01           2 B  node2  current",
            f"  {versions[2]}",
            "    seed was added: 5",
            "2026-01-02 12:01           1 B  node1",
            f"  {versions[1]}",
            "    epochs changed from 1 to 2",
            "2026-01-01 12:01           0 B  node0",
            f"  {versions[0]}",
        ],
    )


def test_the_least_recently_used_versions_are_removed(versions):
    code, [*removed, total] = run("gc", "--max-size", "9")
    assert code == 0
    # The first version has no bytes.
    assert [re.sub(TIME, "TIME", line) for line in removed] == [
        "removed output/sft/tiny, last used TIME",
        "removed output/sft/tiny, last used TIME",
    ]
    assert total == "2 results removed, 1 B; 2 left"
    # What output/ needs stays.
    assert run("gc", "--max-size", "0")[1][-1] == "1 results removed, 9 B; 1 left"
    assert [result.folder for result in stored_results(STORE)] == versions[2:]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("list", "output/sft/none"), "no version of output/sft/none in output/store"),
        (("list", "--store", "nowhere"), "nowhere does not exist: set --store"),
        (("gc", "--max-size", "much"), "'much' is not a size: write a number and K, M, G or T,"),
    ],
)
def test_mistakes_are_one_line(versions, arguments, error):
    code, [line] = run(*arguments)
    assert code == 1 and line.startswith(f"error: {error}")
    assert len(stored_results(STORE)) == 4
