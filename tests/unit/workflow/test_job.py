"""Jobs: their settings, and the imports that planning needs."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from conftest import ROOT
from snakechat.workflow.job import Job


@dataclasses.dataclass(frozen=True)
class Settings:
    epochs: int
    dtype: str = "fp32"


@pytest.fixture
def spec():
    return {
        "rule": "train_sft",
        "name": "tiny",
        "path": "output/sft/tiny",
        "inputs": {"data": {"path": "output/data/toy", "spec": "0"}},
        "settings": {"epochs": 3},
    }


def make_job(spec, folder, settings_type, **facts):
    """Return a job whose input has a manifest with these facts."""
    upstream = {"rule": "import_dataset", "name": "toy", "path": "output/data/toy"}
    upstream |= {"settings": {}, "inputs": {}, "files": {}}
    manifest = {"spec": upstream, "inputs": {}, "lineage": {}, "facts": facts, "files": {}}
    path = folder / "toy.manifest.json"
    path.write_text(json.dumps(manifest))
    return Job(spec, {"data": path}, {"nodes": 1}, settings_type)


def test_settings_are_an_instance_of_the_settings_class(spec, tmp_path):
    assert make_job(spec, tmp_path, Settings).settings == Settings(epochs=3)
    assert make_job(spec, tmp_path, SimpleNamespace).settings.epochs == 3


def test_settings_that_the_class_does_not_have_are_an_error(spec, tmp_path):
    spec["settings"]["epoch"] = 4
    with pytest.raises(TypeError, match="epoch"):
        make_job(spec, tmp_path, Settings)


def test_paths_and_lineage_of_a_job(spec, tmp_path):
    job = make_job(spec, tmp_path, Settings, commit="abc")
    assert str(job.inputs["data"]) == "output/data/toy"
    assert str(job.result) == "output/sft/.tiny.tmp"
    assert job.lineage["output/data/toy"]["facts"] == {"commit": "abc"}


def test_checkpoints_of_other_settings_or_inputs_are_in_other_folders(spec, tmp_path):
    folders = {make_job(spec, tmp_path, Settings, commit=commit).states for commit in "aab"}
    spec["settings"]["epochs"] = 4
    folders.add(make_job(spec, tmp_path, Settings, commit="a").states)
    assert len(folders) == 3
    assert {str(folder.parent) for folder in folders} == {"output/state/train_sft/tiny"}


# Modules that Snakemake imports while it plans, in an environment that may have no other library.
PLANNING = (
    "code_digests",
    "digests",
    "errors",
    "lineage",
    "locks",
    "manifest",
    "specs",
    "staleness",
)


@pytest.mark.parametrize("module", PLANNING)
def test_modules_for_planning_import_the_standard_library_only(module):
    # -S: without site-packages.
    program = f"import sys; sys.path.insert(0, 'scripts'); import snakechat.workflow.{module}"
    process = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
