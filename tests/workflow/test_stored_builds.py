"""Builds with earlier versions of results and a shared store, and with sources that are edited."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from conftest import Workflow, copy_sources
from snakechat.workflow.manifest import RUN_RECORD
from support.background_builds import started

TARGET = "output/tokens/sft/tiny.manifest.json"


@pytest.fixture
def workflow(tmp_path):
    """A function that returns a workflow of a small dataset with a shared store."""

    def make(name):
        copy_sources(tmp_path / name)
        toy = "datasets={toy: {rows: 60, eval_rows: 20}}"
        return Workflow(tmp_path / name, "--config", toy, f"shared_store={tmp_path / 'shared'}")

    return make


def contents(workflow):
    """Return the bytes of the current results."""
    results = ("data/toy", "split/toy", "tokens/sft/tiny", "models/tiny")
    return {
        (result, path.name): path.read_bytes()
        for result in results
        for path in (workflow.folder / "output" / result).iterdir()
        if path.is_file() and path.name != RUN_RECORD
    }


def log(workflow, job):
    """Return the log of a job."""
    return (workflow.folder / f"output/logs/{job}.log").read_text()


def test_a_setting_that_is_changed_and_set_back_needs_no_job(workflow):
    first = workflow("first")
    first.build(TARGET)
    before = contents(first)
    longer = Workflow(first.folder, *first.options, "sft={recipes: {tiny: {max_length: 64}}}")
    longer.build(TARGET)
    assert contents(first) != before
    assert "Nothing to be done" in first.snakemake(TARGET, "-n").stdout
    assert "Nothing to be done" in first.build(TARGET)
    assert contents(first) == before
    # Where a later job runs, it reads the version that is linked before it starts.
    longer.build(TARGET)
    first.build("output/sft/tiny.manifest.json")
    manifest = json.loads((first.folder / "output/sft/tiny.manifest.json").read_text())
    assert manifest["lineage"]["output/tokens/sft/tiny"]["settings"]["max_length"] == 96
    assert contents(first) == before


def test_another_clone_builds_nothing_and_has_the_same_bytes(workflow):
    first, second = workflow("first"), workflow("second")
    first.build(TARGET)
    second.build(TARGET)
    assert contents(second) == contents(first)
    for job in ("import_dataset/toy", "init_model/tiny", "tokenize_sft/tiny"):
        assert "is taken from the shared store" in log(second, job)
    # Damage is noticed, and the job runs.
    shutil.rmtree(second.folder / "output/store/tokenize_sft")
    for path in (first.folder.parent / "shared").rglob("*.ids.npy"):
        path.chmod(0o644)
        path.write_bytes(b"damaged")
    second.build(TARGET)
    assert "is damaged and removed" in log(second, "tokenize_sft/tiny")


def test_the_folder_of_a_model_leads_to_its_evaluation_and_report(workflow):
    build = workflow("first")
    # A model that was built for a page has no report yet.
    build.build("output/eval/sft/tiny.manifest.json")
    assert build.planned("output/sft/tiny") == {"draw_report", "report", "sft"}
    build.build("output/sft/tiny")
    model = build.folder / "output/sft/tiny"
    assert (model / "evaluation/metrics.json").samefile(
        build.folder / "output/eval/sft/tiny/metrics.json"
    )
    assert (model / "report/report.html").exists() and (model / "README.md").exists()
    assert build.planned("output/sft/tiny") == set()
    assert build.run("python", "scripts/verify.py").returncode == 0
    # As people copy it.
    assert build.run("cp", "-rL", "output/sft/tiny", "copied").returncode == 0
    assert (build.folder / "copied/model.safetensors").read_bytes()


def test_two_builds_that_fill_an_empty_store_at_once_both_succeed(workflow):
    workflows = [workflow("first"), workflow("second")]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: each.build(TARGET), workflows))
    assert contents(workflows[0]) == contents(workflows[1])
    shared = workflows[0].folder.parent / "shared"
    process = workflows[0].run("python", "scripts/verify.py", str(shared))
    assert process.returncode == 0, process.stdout


def test_an_edit_during_a_build_counts_from_the_next_build_on(workflow):
    """The edited program would fail."""
    build = workflow("first")
    program = build.folder / "scripts/split_dataset.py"
    original = program.read_text()
    with started(build, TARGET, "--cores", "1") as running:
        running.wait_until((build.folder / "output/logs/import_dataset").exists)
        program.write_text(original + "\nraise SystemExit('edited')\n")
        status, output = running.end()
    assert status == 0, output
    assert "split_dataset" in build.planned(TARGET)
    program.write_text(original)
    assert build.planned(TARGET) == set()
