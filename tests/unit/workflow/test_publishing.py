"""A program that is killed before any change of a file: no result is lost, no work is repeated."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT
from snakechat.workflow.code_digests import code_digests
from snakechat.workflow.manifest import check_files, read_manifest
from support.kills import KILLER

# Writes two files, and counts how often it does so.
PROGRAM = """
from snakechat.workflow.job import run

def main(job):
    (job.result / "text").write_text(job.settings.text)
    (job.result / "deep").mkdir()
    (job.result / "deep/more").write_text(job.settings.text)
    with open("runs", "a") as file:
        file.write(".")

if __name__ == "__main__":
    run(main)
"""

RESULT = Path("output/made/one")
# All that is left next to a result whose job has ended.
COMPLETE = {"one", "one.manifest.json", "one.run.json", ".one.lock"}


@pytest.fixture
def build(tmp_path, monkeypatch):
    """A function that runs the program for a text, or kills it before its Nth change."""
    monkeypatch.chdir(tmp_path)
    Path("scripts").mkdir()
    Path("scripts/snakechat").symlink_to(ROOT / "scripts/snakechat")
    Path("scripts/make.py").write_text(PROGRAM)
    spec = {"rule": "make", "name": "one", "path": str(RESULT), "inputs": {}, "requirements": {}}
    spec["code"] = code_digests("scripts/make.py")

    def build(text, kill_before=None):
        Path("spec.json").write_text(json.dumps(spec | {"settings": {"text": text}}))
        killer = ["-c", KILLER, str(kill_before)] if kill_before else []
        command = [sys.executable, *killer, "scripts/make.py", "--spec", "spec.json"]
        process = subprocess.run(command, capture_output=True, text=True)
        assert process.returncode in (0, -signal.SIGKILL), process.stderr
        return process.returncode == 0

    return build


def complete_texts():
    """Return the texts of all complete results, published or not."""
    texts = []
    for folder in RESULT.parent.iterdir():
        if folder.is_dir() and (manifest := read_manifest(folder / "manifest.json")):
            check_files(folder, manifest)
            texts.append((folder / "text").read_text())
    return texts


def names_of_results():
    return {path.name for path in RESULT.parent.iterdir()}


def test_a_kill_before_any_change_loses_nothing_and_repeats_no_complete_work(build):
    assert build("old")
    shutil.copytree("output", "before")
    kills = 0
    while True:
        shutil.rmtree("output")
        shutil.copytree("before", "output")
        Path("runs").unlink()
        finished = build("new", kill_before=kills + 1)
        # With this manifest, no build runs the job again: nothing may be left to do.
        manifest = read_manifest(f"{RESULT}.manifest.json")
        if manifest and manifest["spec"]["settings"]["text"] == "new":
            assert names_of_results() == COMPLETE
            assert complete_texts() == ["new"]
        texts = complete_texts()
        assert texts, "both results are lost"
        runs = os.path.getsize("runs") if Path("runs").exists() else 0
        assert build("new")
        repeated = os.path.getsize("runs") - runs
        assert repeated == (0 if "new" in texts else 1)
        assert complete_texts() == ["new"]
        assert names_of_results() == COMPLETE
        if finished:
            break
        kills += 1
    # More than the files that the program writes itself: each step of publishing is one.
    assert kills > 12
