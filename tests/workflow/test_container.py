"""Jobs in a container, with a stub of apptainer that runs their commands on this machine."""

import json
import os

import pytest

STUB = """#!/bin/sh
[ "$1" = --version ] && { echo apptainer version 1.4.0; exit; }
echo "$@" >> "$CALLS"
for command; do :; done
exec bash -c "$command"
"""


@pytest.fixture
def workflow(sources):
    """A workflow with an image, and the stub on its path."""
    (sources.folder / "bin").mkdir()
    (sources.folder / "bin/apptainer").write_text(STUB)
    (sources.folder / "bin/apptainer").chmod(0o755)
    (sources.folder / "image.sif").touch()
    changes = {"container": "image.sif", "datasets": {"toy": {"rows": 40, "eval_rows": 8}}}
    (sources.folder / "mine.yaml").write_text(json.dumps(changes))
    sources.options = ("--configfile", "mine.yaml")
    path = f"{sources.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    sources.environment = {"CALLS": str(sources.folder / "calls"), "PATH": path}
    return sources


@pytest.mark.exhaustive
def test_jobs_run_in_the_image_with_sdm_apptainer(workflow, monkeypatch):
    monkeypatch.setenv("PATH", workflow.environment["PATH"])
    target = "output/data/toy.manifest.json"
    process = workflow.snakemake(target, "--cores", "1", "--sdm", "apptainer")
    assert process.returncode == 0, process.stdout
    (call,) = (workflow.folder / "calls").read_text().splitlines()
    assert call.startswith("exec") and "image.sif" in call and "launch.py" in call
