"""Jobs: their inputs, what a killed one leaves, and what the launcher decides."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from snakechat.workflow.digests import digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import (
    CHECKED,
    Job,
    finish,
    read_spec,
    recover,
    reuse_result,
    write_manifest,
)
from snakechat.workflow.locks import acquire_lock
from snakechat.workflow.manifest import result_files
from snakechat.workflow.placement import SERIAL
from snakechat.workflow.run_options import DEFAULTS
from support.specs import EMPTY_SPEC


@pytest.fixture
def spec():
    return {
        "rule": "train_sft",
        "name": "tiny",
        "path": "output/sft/tiny",
        **EMPTY_SPEC,
        "inputs": {"data": {"rule": "import_dataset", "name": "toy", "path": "output/data/toy"}},
        "settings": {"epochs": 3},
    }


def make_job(spec, content="a", **facts):
    """Return a job whose input has a file with this digest and these facts."""
    upstream = {"rule": "import_dataset", "name": "toy", "path": "output/data/toy", **EMPTY_SPEC}
    files = {"rows": {"size": 1, "sha256": content}}
    manifest = {"spec": upstream, "inputs": {}, "lineage": {}, "facts": facts, "files": files}
    return Job(spec, {"data": manifest}, SERIAL, DEFAULTS, SimpleNamespace)


def test_checkpoints_of_other_settings_or_inputs_are_in_other_folders(spec):
    folders = {make_job(spec, content).states for content in "aab"}
    spec["settings"]["epochs"] = 4
    folders.add(make_job(spec, "a").states)
    assert len(folders) == 3
    assert {str(folder.parent) for folder in folders} == {"output/state/train_sft/tiny"}


def test_an_input_counts_by_its_content_unless_the_program_shows_its_provenance(spec):
    digests = {make_job(spec, commit=commit).input_digests["data"] for commit in "ab"}
    assert len(digests) == 1
    spec["shows_provenance"] = True
    digests |= {make_job(spec, commit=commit).input_digests["data"] for commit in "ab"}
    assert len(digests) == 3


def write_result(job, folder, text):
    """Write a result of a job, with its manifest inside."""
    folder.mkdir(parents=True)
    (folder / "weights").write_text(text)
    content = {"lineage": {}, "facts": {}, "files": result_files(folder)}
    manifest = {"spec": job.spec, "inputs": job.input_digests, **content}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def job(spec, tmp_path, monkeypatch):
    """A job in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output/sft").mkdir(parents=True)
    return make_job(spec)


def test_a_complete_folder_of_a_killed_job_becomes_the_result(job):
    write_result(job, job.result, "new")
    recover(job)
    finish(job)
    assert (job.target / "weights").read_text() == "new"
    assert {path.name for path in job.stored.parent.iterdir()} == {job.key}
    assert {path.name for path in job.target.parent.iterdir()} == {"tiny", "tiny.manifest.json"}


def test_files_of_a_result_have_the_permissions_of_its_folder(job, monkeypatch):
    """Other users of a shared store read them."""
    (job.result / "adapter").mkdir(parents=True)
    job.result.chmod(0o755)
    for name in ("weights", "adapter/weights"):
        (job.result / name).write_text("as safetensors writes them")
        (job.result / name).chmod(0o600)
    monkeypatch.setattr("snakechat.workflow.job.run_record", lambda *_: "{}")
    write_manifest(job, 0.0)
    for name in ("weights", "adapter/weights", "manifest.json", "run.json"):
        assert (job.result / name).stat().st_mode & 0o777 == 0o644


def test_the_launcher_checks_inputs_and_holds_no_lock_while_the_program_runs(job, monkeypatch):
    """The first process of the program takes the lock."""
    write_result(job, job.result, "new")
    (job.result / "manifest.json").unlink()
    spec = {**job.spec, "inputs": {}}
    Path("spec.json").write_text(json.dumps(spec))
    monkeypatch.setenv(CHECKED, "")
    # The rule has not created the log yet.
    assert not reuse_result("spec.json", DEFAULTS, "none.log")
    os.close(acquire_lock("output/sft/.tiny.lock"))
    assert os.environ[CHECKED] == Job(spec, {}, SERIAL, DEFAULTS, SimpleNamespace).key


def test_a_result_that_another_process_makes_is_one_line(job):
    Path("spec.json").write_text(json.dumps({**job.spec, "inputs": {}}))
    descriptor = acquire_lock("output/sft/.tiny.lock")
    line = r"error: output/sft/tiny is being made by process \d+ on .*: wait for it, or stop it"
    with pytest.raises(SystemExit, match=line):
        reuse_result("spec.json", DEFAULTS)
    os.close(descriptor)


def test_nodes_that_decide_separately_decide_the_same(job, monkeypatch):
    spec = {**job.spec, "inputs": {}}
    Path("spec.json").write_text(json.dumps(spec))
    one = Job(spec, {}, SERIAL, DEFAULTS, SimpleNamespace)
    for node in (0, 1):
        monkeypatch.setenv(CHECKED, "")
        # Complete, but another node may have looked before.
        shutil.rmtree(one.result, ignore_errors=True)
        write_result(one, one.result, "new")
        assert not reuse_result("spec.json", DEFAULTS, node=node)
    recover(one)
    monkeypatch.setenv(CHECKED, "")
    for node, is_linked in ((1, False), (0, True)):
        assert reuse_result("spec.json", DEFAULTS, node=node)
        assert one.target.exists() == is_linked


def test_a_spec_file_that_does_not_match_its_name_is_an_error(spec, tmp_path):
    path = tmp_path / f"tiny-{digest(spec)[:16]}.json"
    path.write_text(json.dumps(spec))
    assert read_spec(path) == spec
    path.write_text(json.dumps({**spec, "settings": {"epochs": 4}}))
    with pytest.raises(InputError, match="was edited or damaged: start the build again"):
        read_spec(path)
    path.write_text("")
    with pytest.raises(InputError, match="was edited or damaged"):
        read_spec(path)
