"""Builds with earlier versions of results, and in a store that they share."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from conftest import Workflow, copy_sources
from snakechat.workflow.manifest import RUN_RECORD

TARGET = "output/tokens/sft/tiny.manifest.json"


@pytest.fixture
def workflow(tmp_path):
    """A function that returns a workflow of a small dataset with a store that all share."""

    def make(name):
        copy_sources(tmp_path / name)
        small = "datasets={toy: {rows: 60, eval_rows: 20}}", "deployments={cpu: {threads: 1}}"
        return Workflow(tmp_path / name, "--config", *small, f"store={tmp_path / 'shared'}")

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


def build_without_forks(workflow, target):
    """Build a target by programs that import their libraries within their limits, as for users."""
    workflow.environment["PROGRAM_FORKS"] = ""
    workflow.build(target)
    workflow.environment.clear()


def test_a_setting_that_is_changed_and_set_back_needs_no_job(workflow):
    first = workflow("first")
    first.build(TARGET)
    before = contents(first)
    changes = "sft={recipes: {tiny: {max_length: 64, train_on: response}}}"
    longer = Workflow(first.folder, *first.options, changes)
    longer.build(TARGET)
    assert contents(first) != before
    # The tokens say what the loss counts.
    rows = first.run("python", "scripts/show_rows.py", "output/tokens/sft/tiny", "-n", "1").stdout
    assert "; train_on: response; " in rows and "prompt:\n⟦" not in rows
    assert "Nothing to be done" in first.snakemake(TARGET, "-n").stdout
    assert "Nothing to be done" in first.build(TARGET)
    assert contents(first) == before
    # Where a later job runs, it reads the version that is linked before it starts.
    longer.build(TARGET)
    build_without_forks(first, "output/sft/tiny.manifest.json")
    manifest = json.loads((first.folder / "output/sft/tiny.manifest.json").read_text())
    [tokens] = (job for job in manifest["lineage"].values() if job["rule"] == "tokenize_sft")
    assert tokens["settings"]["max_length"] == 96
    assert contents(first) == before


def test_clones_share_a_store_and_damage_is_made_again(workflow):
    first, second, third = map(workflow, ("first", "second", "third"))
    # Two builds that fill an empty store at once both succeed.
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: each.build(TARGET), (first, second)))
    assert "Importing dataset" not in third.build(TARGET)
    assert contents(first) == contents(second) == contents(third)
    # All are roots of the store.
    shared = first.folder.parent / "shared"
    assert len(list((shared / "roots").iterdir())) == 3
    gc = ("python", "scripts/store.py", "gc", "--store", str(shared), "--max-size", "0")
    assert first.run(*gc).stdout.startswith("0 results removed")
    process = first.run("python", "scripts/verify.py", str(shared))
    assert process.returncode == 0, process.stdout
    # Damage of the same size is found by the next job that reads it.
    [records] = shared.glob("import_dataset/*/train.parquet")
    before = records.read_bytes()
    records.write_bytes(before[:-1] + b"x")
    output = second.build("output/tokens/reward/tiny.manifest.json")
    assert f"{records.parent} is damaged and is made again: train.parquet has other" in output
    assert records.read_bytes() == before
    assert contents(second) == contents(first)


def test_a_store_that_is_read_only_is_read_and_new_results_go_to_the_own_store(workflow):
    first, second = workflow("first"), workflow("second")
    first.build("output/split/toy.manifest.json")
    shared = first.folder.parent / "shared"
    if subprocess.run(["mount", "--bind", "-o", "ro", shared, shared]).returncode:
        pytest.skip("needs permission to mount a disk")
    try:
        output = second.build(TARGET)
    finally:
        subprocess.run(["umount", shared], check=True)
    line = f"{shared} is read-only: its results are used, and new ones go to output/store"
    assert output.count(line) == 1
    assert "Importing dataset" not in output and "Initializing model" in output
    assert (second.folder / "output/data/toy").resolve().is_relative_to(shared)
    assert {path.name for path in (second.folder / "output/store").iterdir()} >= {"init_model"}
    first.build(TARGET)
    assert contents(first) == contents(second)


SWEEP = """
sft: {recipes: {tiny: {epochs: 1}}}
dpo: {recipes: {tiny: {epochs: 1, dtype: fp32}}}
sweeps:
  rates: {stage: dpo, recipe: tiny, over: {learning_rate: [0.001, 0.002], seed: [1, 2, 3]}}
"""


def test_a_sweep_tokenizes_once_and_computes_its_reference_once(workflow):
    sweep = workflow("first")
    (sweep.folder / "sweep.yaml").write_text(SWEEP)
    sweep.options = (*sweep.options, "--configfile", "sweep.yaml")
    output = sweep.build("output/compare/dpo/rates.html", "--until", "compute_reference")
    assert output.count("Computing the reference log-probabilities") == 6
    store = sweep.folder.parent / "shared"
    assert [
        len(list(store.glob(f"{rule}/*"))) for rule in ("tokenize_dpo", "compute_reference")
    ] == [1, 1]


def test_the_folder_of_a_model_leads_to_its_evaluation_and_report(workflow):
    build = workflow("first")
    # A model that was built for a page has no report yet.
    build.build("output/eval/sft/tiny.manifest.json")
    assert build.planned("output/sft/tiny") == {"draw_report"}
    build_without_forks(build, "output/sft/tiny")
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
