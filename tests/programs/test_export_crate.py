"""A model is exported with its lineage as an RO-Crate."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import rocrate
import yaml

from conftest import ROOT
from snakechat.workflow.manifest import result_files
from support.lineages import COMMIT, LINEAGE

PROGRAM = ROOT / "scripts/export_crate.py"
CONTEXT = Path(rocrate.__file__).with_name("data") / "ro-crate.jsonld"
MODEL = "output/sft/mine"


def export(folder, result=MODEL, crate="crate"):
    """Run the program in a folder."""
    command = [sys.executable, PROGRAM, result, crate]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def validator():
    """Return the Python of the RO-Crate validator, or None (make test installs it)."""
    places = (shutil.which("rocrate-validator"), ROOT / ".venv-crate/bin/rocrate-validator")
    found = next((Path(place) for place in places if place and Path(place).exists()), None)
    return found and found.with_name("python")


@pytest.fixture
def tree(tmp_path):
    """A model whose lineage has sources of every kind."""
    lineage = {path: entry for path, entry in LINEAGE.items() if path != MODEL}
    folder = tmp_path / MODEL
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("# Mine")
    inputs = {
        path: {"rule": lineage[path]["rule"], "name": lineage[path]["name"], "path": path}
        for path in LINEAGE[MODEL]["inputs"]
    }
    spec = {"rule": "train_sft", "name": "mine", "path": MODEL, "settings": {"seed": 1}}
    spec |= {"inputs": inputs, "files": {}, "code": {}, "requirements": {}}
    manifest = {"spec": spec, "inputs": {}, "lineage": lineage, "facts": {}}
    text = json.dumps(manifest | {"files": result_files(folder)})
    (folder / "manifest.json").write_text(text)
    Path(f"{folder}.manifest.json").write_text(text)
    return tmp_path


def entities_of(crate):
    """Return the entities of a crate by id."""
    graph = json.loads((crate / "ro-crate-metadata.json").read_text())["@graph"]
    return {entity["@id"]: entity for entity in graph}


def ids(value):
    """Return the ids that a property refers to."""
    return {of["@id"] for of in (value if isinstance(value, list) else [value])}


def test_each_job_is_an_action_with_its_inputs_and_its_program(tree):
    assert export(tree).returncode == 0
    entities = entities_of(tree / "crate")
    actions = {id for id in entities if id.startswith("#job-")}
    assert actions == {f"#job-{path}" for path in LINEAGE}
    training = entities[f"#job-{MODEL}"]
    assert ids(training["instrument"]) == {"scripts/train_sft.py"}
    inputs = {f"#{path}" for path in LINEAGE[MODEL]["inputs"]}
    assert ids(training["object"]) == {*inputs, f"#settings-{MODEL}"}
    assert ids(training["result"]) == {"model/"}
    assert entities[f"#control-{MODEL}"]["instrument"] == {"@id": "#step-train_sft"}


def test_the_workflow_has_the_version_to_cite(tree):
    export(tree)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert entities_of(tree / "crate")["Snakefile"]["version"] == cited["version"]


def test_sources_have_their_commit_and_licence(tree):
    export(tree)
    entities = entities_of(tree / "crate")
    url = f"https://huggingface.co/datasets/lab/public/tree/{COMMIT}"
    assert entities[url]["license"] == "cc-by-nc-4.0" and entities[url]["version"] == COMMIT
    assert entities[url]["inLanguage"] == ["en", "zh"]
    assert entities["#source-of-output/data/mine"]["license"] == "unknown"
    assert ids(entities["#run"]["object"]) == {
        url,
        f"https://huggingface.co/lab/base/tree/{COMMIT}",
        "#source-of-output/data/mine",
    }
    assert entities["#license"]["name"] == "llama3.2"


def test_the_files_of_the_model_are_in_the_crate(tree):
    export(tree)
    names = {"config.json", "README.md", "manifest.json"}
    assert {path.name for path in (tree / "crate/model").iterdir()} == names
    assert {f"model/{name}" for name in names} <= ids(entities_of(tree / "crate")["./"]["hasPart"])


def test_mistakes_are_one_line_and_leave_nothing(tree):
    (tree / "crate").mkdir()
    before = sorted(path.name for path in tree.iterdir())
    (tree / MODEL / "config.json").write_text("{ }")
    cases = {
        (MODEL, "crate"): "error: crate exists: name another folder\n",
        ("output/sft/other", "new"): "error: output/sft/other.manifest.json cannot be read: build"
        " output/sft/other first\n",
        (MODEL, "new"): f"error: {MODEL}/config.json does not match its manifest: delete {MODEL}"
        " and start the build again\n",
    }
    for (result, crate), line in cases.items():
        process = export(tree, result, crate)
        assert (process.returncode, process.stderr) == (1, line)
    assert sorted(path.name for path in tree.iterdir()) == before


@pytest.mark.slow
@pytest.mark.skipif(validator() is None, reason="the RO-Crate validator is not installed")
def test_the_crate_of_a_build_is_a_provenance_run_crate(quick, tmp_path):
    assert export(quick.folder, "output/rlhf/tiny", tmp_path / "crate").returncode == 0
    command = [validator(), ROOT / "tests/support/crate_validator.py", CONTEXT, "-y", "validate"]
    command += ["crate", "-p", "provenance-run-crate", "-l", "required", "--no-cache", "-f", "json"]
    command += ["--skip-availability-check", "-o", "issues.json"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    report = tmp_path / "issues.json"
    assert report.exists(), process.stdout + process.stderr
    found = json.loads(report.read_text())
    assert found["issues"] == [] and found["passed"], found["issues"]
