"""Jobs in a container, with a stub of apptainer that runs their commands on this machine."""

import json
import os

STUB = """#!/bin/sh
[ "$1" = --version ] && { echo apptainer version 1.4.0; exit; }
echo "$@" >> "$CALLS"
for command; do :; done
exec bash -c "$command"
"""


def test_jobs_run_in_the_image_with_sdm_apptainer(sources, monkeypatch):
    folder = sources.folder
    (folder / "bin").mkdir()
    (folder / "bin/apptainer").write_text(STUB)
    (folder / "bin/apptainer").chmod(0o755)
    (folder / "image.sif").touch()
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(folder / "calls"))
    changes = {"container": "image.sif", "datasets": {"toy": {"rows": 40, "eval_rows": 8}}}
    (folder / "mine.yaml").write_text(json.dumps(changes))
    sources.options = ("--sdm", "apptainer", "--configfile", "mine.yaml")
    sources.build("output/data/toy.manifest.json")
    (call,) = (folder / "calls").read_text().splitlines()
    assert call.startswith("exec") and "image.sif" in call and "launch.py" in call
