"""Builds with a cache of results, and builds whose sources are edited while they run."""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import Workflow, copy_sources

TARGET = "output/tokens/sft/tiny.manifest.json"


@pytest.fixture
def workflow(tmp_path):
    """A function that returns a workflow of a small dataset with a common cache."""

    def make(name):
        copy_sources(tmp_path / name)
        toy = "datasets={toy: {rows: 60, eval_rows: 20}}"
        return Workflow(tmp_path / name, "--config", toy, f"cache={tmp_path / 'cache'}")

    return make


def contents(workflow):
    """Return the bytes of all manifests and results."""
    folder = workflow.folder / "output"
    paths = [path for part in ("data", "split", "tokens", "models") for path in folder.glob(part)]
    files = [path for part in paths for path in part.rglob("*") if path.is_file()]
    names = {path.relative_to(folder): path.read_bytes() for path in files}
    varying = ("*.run.json", ".*.lock")
    return {
        name: data
        for name, data in names.items()
        if not any(name.match(pattern) for pattern in varying)
    }


def log(workflow, job):
    """Return the log of a job."""
    return (workflow.folder / f"output/logs/{job}.log").read_text()


def test_a_setting_that_is_changed_and_set_back_takes_results_from_the_cache(workflow):
    first = workflow("first")
    first.build(TARGET)
    before = contents(first)
    longer = Workflow(first.folder, *first.options, "sft={recipes: {tiny: {max_length: 64}}}")
    longer.build(TARGET)
    assert contents(first) != before
    first.build(TARGET)
    assert contents(first) == before
    assert "is taken from the cache" in log(first, "tokenize_sft/tiny")
    listed = first.run("python", "scripts/cache.py", "list", "output/tokens/sft/tiny",
                       "--cache", str(first.folder.parent / "cache"))  # fmt: skip
    assert listed.returncode == 0, listed.stdout
    assert "sft.max_length changed" in listed.stdout


def test_another_clone_builds_nothing_and_has_the_same_bytes(workflow):
    first, second = workflow("first"), workflow("second")
    first.build(TARGET)
    second.build(TARGET)
    assert contents(second) == contents(first)
    for job in ("import_dataset/toy", "init_model/tiny", "tokenize_sft/tiny"):
        assert "is taken from the cache" in log(second, job)
    # Damage is noticed, and the job runs.
    shutil.rmtree(second.folder / "output/tokens")
    for path in (first.folder.parent / "cache").rglob("*.ids.npy"):
        path.chmod(0o644)
        path.write_bytes(b"damaged")
    second.build(TARGET)
    assert "is damaged and ignored" in log(second, "tokenize_sft/tiny")


@pytest.mark.parametrize("damage", ["a file", "a folder without write permission"])
def test_a_cache_that_cannot_be_written_costs_a_warning(workflow, damage):
    build = workflow("first")
    cache = build.folder.parent / "cache"
    if damage == "a file":
        cache.touch()
    elif os.getuid() == 0:
        # The permissions of root's files do not matter, those of the kernel's do.
        cache.symlink_to("/proc/sys")
    else:
        cache.mkdir(mode=0o500)
    build.build("output/data/toy.manifest.json")
    assert "warning: output/data/toy is not stored" in log(build, "import_dataset/toy")
    assert build.planned("output/data/toy.manifest.json") == set()


def test_two_builds_that_fill_an_empty_cache_at_once_both_succeed(workflow):
    workflows = [workflow("first"), workflow("second")]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: each.build(TARGET), workflows))
    assert contents(workflows[0]) == contents(workflows[1])
    cache = workflows[0].folder.parent / "cache"
    process = workflows[0].run("python", "scripts/cache.py", "verify", "--cache", str(cache))
    assert process.returncode == 0, process.stdout


def test_an_edit_during_a_build_counts_from_the_next_build_on(workflow):
    """The edited program would fail."""
    build = workflow("first")
    program = build.folder / "scripts/split_dataset.py"
    command = [sys.executable, "-m", "snakemake", TARGET, "--cores", "1", *build.options]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with (build.folder / "build.log").open("w") as file:
        process = subprocess.Popen(
            command, cwd=build.folder, env={**os.environ, "PATH": path}, stdout=file, stderr=file
        )
        while process.poll() is None and not (build.folder / "output/logs/import_dataset").exists():
            time.sleep(0.01)
        original = program.read_text()
        program.write_text(original + "\nraise SystemExit('edited')\n")
        assert process.wait() == 0, (build.folder / "build.log").read_text()
    assert "split_dataset" in build.planned(TARGET)
    program.write_text(original)
    assert build.planned(TARGET) == set()
