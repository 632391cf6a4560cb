"""Jobs: their inputs, what a killed one leaves, and what the launcher decides."""

import importlib.metadata
import json
import os
import resource
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from snakechat.workflow.code_digests import Code, Modules
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import PREPARED, Job, read_spec, write_outcome
from snakechat.workflow.links import link_result, paths_by_key
from snakechat.workflow.manifest import (
    STORE,
    digest,
    read_run_record,
    result_files,
    sealed_json,
    without_names,
)
from snakechat.workflow.processes import DEFAULTS, SERIAL, RunOptions
from snakechat.workflow.publishing import (
    check_inputs,
    complete,
    external_files,
    finish,
    prepare,
    publish_result,
    replaces_stored,
    run_record,
)
from snakechat.workflow.store import (
    AlreadyLocked,
    acquire_lock,
    delete_lock,
    publish,
    stored_folders,
    work_path,
)
from store import collect
from support.specs import EMPTY_SPEC
from support.stored_results import make_result


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


def write_result(job, folder, text):
    """Write a result of a job, with its manifest inside."""
    folder.mkdir(parents=True)
    (folder / "weights").write_text(text)
    content = {"lineage": {}, "facts": {}, "files": result_files(folder)}
    manifest = {"spec": without_names(job.spec), "inputs": job.recorded_inputs, **content}
    (folder / "manifest.json").write_text(sealed_json(manifest))


@pytest.fixture
def job(spec, tmp_path, monkeypatch):
    """A job in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output/sft").mkdir(parents=True)
    files = {"rows": {"size": 1, "sha256": "a"}}
    manifest = {"spec": {"rule": "import_dataset", **EMPTY_SPEC}, "inputs": {}, "lineage": {}}
    manifest |= {"facts": {}, "files": files}
    return Job(spec, {"data": manifest}, SERIAL, DEFAULTS, SimpleNamespace)


def test_files_of_a_result_have_the_permissions_of_its_folder(job, monkeypatch):
    """Other users of a shared store read them."""
    (job.result / "adapter").mkdir(parents=True)
    job.result.chmod(0o755)
    for name in ("weights", "adapter/weights"):
        (job.result / name).write_text("as safetensors writes them")
        (job.result / name).chmod(0o600)
    # A command runs in processes of its own: the largest one counts, in kB.
    kilobytes = {resource.RUSAGE_SELF: 10 << 10, resource.RUSAGE_CHILDREN: 20 << 10}
    usages = {kind: SimpleNamespace(ru_maxrss=each) for kind, each in kilobytes.items()}
    monkeypatch.setattr(resource, "getrusage", usages.get)
    write_outcome(job)
    complete(job, 0.0)
    assert read_run_record(job.result)["peak_memory_mb"] == 20
    for name in ("weights", "adapter/weights", "manifest.json", "run.json"):
        assert (job.result / name).stat().st_mode & 0o777 == 0o644


REQUIRING = {"requirements": {"numpy": "0.1", "not-installed-anywhere": "1.0"}}


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_clock_that_is_set_changes_no_duration(tmp_path, monkeypatch, seconds):
    started = time.time()
    monkeypatch.setattr(time, "time", lambda: started + seconds)
    (tmp_path / "run.json").write_text(run_record(REQUIRING, DEFAULTS, {"steps": 3}, started))
    record = read_run_record(tmp_path)
    assert abs(record["seconds"]) < 60 and record["steps"] == 3
    assert record["versions"] == {"numpy": importlib.metadata.version("numpy")}
    assert record["spec"] == digest(REQUIRING)


@pytest.mark.parametrize("name", ["run.json", "weights"])
def test_a_link_in_a_new_result_is_not_followed(job, tmp_path, name):
    job.result.mkdir(parents=True)
    write_outcome(job)
    (tmp_path / "private").write_text("{}")
    (tmp_path / "private").chmod(0o600)
    (job.result / name).unlink(missing_ok=True)
    (job.result / name).symlink_to(tmp_path / "private")
    with pytest.raises(InputError, match=f"{name}: the program made something else than a file"):
        complete(job, 0.0)
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600


@pytest.fixture
def alone(job, monkeypatch):
    """The job without inputs, and its spec file."""
    spec = {**job.spec, "inputs": {}}
    Path("spec.json").write_text(json.dumps(spec))
    monkeypatch.setenv(PREPARED, "")
    monkeypatch.setattr(Modules, "code", lambda *_: Code({}, frozenset(), frozenset()))
    return Job(spec, {}, SERIAL, DEFAULTS, SimpleNamespace)


def prepare_alone(spec_file="spec.json", options=DEFAULTS, **named):
    return prepare(spec_file, "scripts/none.py", SERIAL, options, **named)


def test_the_launcher_keeps_the_lock_while_the_program_runs(alone, monkeypatch):
    # The rule has not created the log yet.
    monkeypatch.setenv("SNAKECHAT_LOG", "none.log")
    job = prepare_alone()
    with pytest.raises(AlreadyLocked):
        acquire_lock(work_path(alone.place, "lock"))
    assert os.environ[PREPARED] == alone.key and alone.result.is_dir()
    with pytest.raises(InputError, match="output/sft/tiny: the program wrote no result"):
        publish_result(job, 0.0)


def test_gc_keeps_what_an_interrupted_job_reads_though_no_link_leads_to_it(alone, spec):
    old, new = (make_result(STORE, rule="import_dataset", rows=rows) for rows in (1, 2))
    link_result("output/data/toy", old)
    Path("spec.json").write_text(json.dumps(spec))
    job = prepare_alone()
    (job.states / "00000020").mkdir()
    # Another config is built.
    link_result("output/data/toy", new)
    for interrupted, kept in ((False, {old, new}), (True, {new})):
        collect(STORE, paths_by_key(STORE, Path("output")), time.time() + 1, 0, interrupted)
        assert set(stored_folders(STORE)) == kept


def test_a_second_job_of_one_key_waits_and_then_links(alone, capsys, monkeypatch):
    descriptor = acquire_lock(work_path(alone.place, "lock"))
    write_result(alone, alone.result, "new")

    def finish_first():
        time.sleep(1)
        publish(alone.place)
        finish(alone)
        os.close(descriptor)

    other = {**alone.spec, "name": "other", "path": "output/sft/other"}
    Path("other.json").write_text(json.dumps(other))
    first = threading.Thread(target=finish_first)
    first.start()
    # The result keeps the log of the job that made it.
    Path("log").write_text("made")
    monkeypatch.setenv("SNAKECHAT_LOG", "log")
    assert prepare_alone("other.json") is None
    assert Path("log").read_text() == "made"
    first.join()
    assert f"waiting for process {os.getpid()} on" in capsys.readouterr().out
    assert Path("output/sft/other/weights").samefile("output/sft/tiny/weights")
    assert {path.name for path in alone.place.parent.iterdir()} == {alone.key}


FORCED = [("old", None), ("new", None), ("new", "output/sft/other"), ("new", "cannot be read")]


@pytest.mark.parametrize(("text", "reader"), FORCED)
def test_a_forced_run_replaces_no_result_that_others_read(alone, monkeypatch, capsys, text, reader):
    monkeypatch.setattr("snakechat.workflow.publishing.is_forced", lambda spec: True)
    write_result(alone, alone.place, "old")
    link_result(alone.target, alone.place)
    if reader == "cannot be read":
        (STORE / "roots").mkdir()
        (STORE / "roots/0").write_text("/elsewhere/output")
    elif reader:
        link_result(reader, alone.place)
    write_result(alone, alone.result, text)
    assert replaces_stored(alone) == (not reader and text == "new")
    printed = capsys.readouterr().out
    outcome = "the same bytes" if text == "old" else "other bytes than before: weights"
    assert f"output/sft/tiny: the forced run made {outcome}" in printed
    assert (reader or "") in printed and ("stays" in printed) == bool(reader)


@pytest.mark.parametrize("runs", [False, True])
def test_a_job_whose_store_was_changed_goes_on_from_its_checkpoints(alone, tmp_path, runs):
    (alone.states / "00000020").mkdir(parents=True)
    if runs:
        descriptor = acquire_lock(work_path(alone.place, "lock"))
    job = prepare_alone(options=RunOptions(stores=["shared", "output/store"]))
    if runs:
        os.close(descriptor)
    assert job.states == Path("shared/train_sft", f".{alone.key}", "state")
    assert (job.states / "00000020").exists() != runs
    assert alone.states.exists() == runs


def test_a_damaged_input_is_named_and_set_aside(job):
    write_result(job, job.place, "good")
    (job.place / "weights").write_text("ouch")
    with pytest.raises(InputError, match="is damaged: start the build again"):
        check_inputs([job.place])
    assert not job.place.exists()


def test_nodes_that_decide_separately_decide_the_same(alone):
    for node in (0, 1):
        # Complete, but another node may have looked before.
        shutil.rmtree(alone.result, ignore_errors=True)
        write_result(alone, alone.result, "new")
        assert prepare_alone(node=node)
        delete_lock(alone.place)
    write_result(alone, alone.place, "new")
    for node, is_linked in ((1, False), (0, True)):
        assert prepare_alone(node=node) is None
        assert alone.target.exists() == is_linked


def test_external_files_are_below_the_source_without_the_split_of_a_dataset(spec):
    files = {"train/a/rows.csv": "1", "eval/rows.csv": "2"}
    options = RunOptions(source="/data")

    def paths(rule):
        of_rule = {**spec, "rule": rule, "files": files, "inputs": {}}
        return external_files(Job(of_rule, {}, SERIAL, options, SimpleNamespace))

    assert paths("import_dataset") == {Path("/data/a/rows.csv"): "1", Path("/data/rows.csv"): "2"}
    assert paths("fetch_model").keys() == {Path("/data", name) for name in files}


def test_a_spec_file_that_does_not_match_its_name_is_an_error(spec, tmp_path):
    path = tmp_path / f"tiny-{digest(spec)[:16]}.json"
    path.write_text(json.dumps(spec))
    assert read_spec(path) == spec
    for text in (json.dumps({**spec, "settings": {"epochs": 4}}), ""):
        path.write_text(text)
        with pytest.raises(InputError, match="was edited or damaged: start the build again"):
            read_spec(path)
