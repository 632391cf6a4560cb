"""store.py lists versions of results, and removes what is not needed."""

import os
import re
import sys
import time

import pytest

import store
from snakechat.workflow.links import link_result
from snakechat.workflow.manifest import STORE, digest, read_manifest, sealed_json
from snakechat.workflow.store import stored_folders
from support.specs import EMPTY_RUN
from support.stored_results import make_result

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d"


@pytest.fixture
def versions(tmp_path, monkeypatch):
    """Three versions of a result, the newest one in output/, and another result."""
    monkeypatch.chdir(tmp_path)
    folders = []
    for number, settings in enumerate(({"epochs": 1}, {"epochs": 2}, {"epochs": 2, "seed": 5})):
        folder = make_result(STORE, {"model": "x" * number}, **settings)
        spec = read_manifest(folder / "manifest.json")["spec"]
        record = {"spec": digest(spec), "seconds": 60, "host": f"node{number}"}
        record["started"] = f"2026-01-0{number + 1}T12:00:00+00:00"
        (folder / "run.json").write_text(sealed_json(EMPTY_RUN | record))
        link_result("output/sft/tiny", folder)
        folders.append(folder)
    folders.append(make_result(STORE, name="other"))
    for number, folder in enumerate(folders):
        os.utime(folder, (time.time() - (10 - number) * 24 * 3600,) * 2)
    return folders


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs store.py, and returns its output by lines, without times."""

    def run_program(*arguments):
        monkeypatch.setattr(sys, "argv", ["store.py", *arguments])
        store.main()
        return re.sub(TIME, "TIME", capsys.readouterr().out).splitlines()

    return run_program


def test_results_and_versions_are_listed_with_what_changed(versions, run):
    tiny, other, total = run("list")
    assert re.fullmatch(r"TIME .* KiB     3 versions  output/sft/tiny", tiny)
    # A result that another output folder uses has no name here.
    assert re.fullmatch(rf"TIME .* 1 version   train_sft/{versions[3].name}", other)
    assert total.startswith("4 results, ")
    lines = run("list", "output/sft/tiny/")
    assert [re.sub(r"  +[\d.]+ (KiB|B)", "", line) for line in lines] == [
        "TIME  node2  current",
        f"  {versions[2]}",
        "    seed was added: 5",
        "TIME  node1",
        f"  {versions[1]}",
        "    epochs changed from 1 to 2",
        "TIME  node0",
        f"  {versions[0]}",
    ]
    (versions[0] / "manifest.json").write_text("")
    assert run("list", "output/sft/tiny")[5] == "    a manifest cannot be read"


def test_what_no_link_leads_to_is_removed(versions, run):
    *removed, total = run("gc", "--max-size", "0")
    assert removed == [
        f"removed train_sft/{versions[0].name}, last used TIME: output/sft/tiny",
        f"removed train_sft/{versions[1].name}, last used TIME: output/sft/tiny",
        f"removed train_sft/{versions[3].name}, last used TIME",
    ]
    assert re.match("3 results removed, .*; 1 left, ", total)
    assert stored_folders(STORE) == [versions[2]]
