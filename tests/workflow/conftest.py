"""The build that the tests of staleness share."""

import contextlib
import json
import shutil
import subprocess

import pytest

from conftest import Workflow, copy_sources
from support import llm_endpoint
from support.hub import serving
from support.staleness import (
    FAR,
    QUICK_FILE,
    TARGETS,
    build_stubs,
    keys_of,
    lines,
    nested,
    write_config,
    write_inputs,
)


@pytest.fixture(scope="session")
def built(quick, make_once, tmp_path_factory):
    """The quick build with all of TARGETS, one for all workers. No test changes it."""
    options = (*quick.options, "mine.yaml")

    def make(folder):
        quick.copy(folder)
        workflow = Workflow(folder, *options)
        # What OURS names. The classifier is never built; planning reads only its config.json.
        write_inputs(folder)
        model = {path.name: path.read_bytes() for path in (folder / "output/models/tiny").iterdir()}
        for name, content in model.items():
            (folder / "model" / name).write_bytes(content)
        with serving() as hub, llm_endpoint.serving() as endpoint:
            endpoint.replies = [llm_endpoint.prefer_first_in_alphabet]
            # Its address changes no result.
            write_config(folder, nested("llm_judges.wise.url", endpoint.url))
            rows = {"train.jsonl": lines(*range(40)).encode()}
            hub.repositories = {"model/lab/far": model, "dataset/lab/far": rows}
            workflow.environment = {
                "HF_ENDPOINT": hub.endpoint,
                "HF_HOME": str(tmp_path_factory.mktemp("home")),
                "HF_HUB_OFFLINE": "0",
                "NO_PROXY": "127.0.0.1,localhost",
            }
            workflow.build(FAR, "output/models/far.manifest.json")
            for kind, path in (("model", "models"), ("dataset", "data")):
                manifest = json.loads((folder / f"output/{path}/far/manifest.json").read_text())
                assert manifest["facts"]["commit"] == hub.commit(f"{kind}/lab/far")
            # Without these variables, programs are forks.
            workflow.environment = {"NO_PROXY": "127.0.0.1,localhost"}
            workflow.build(*TARGETS)
        write_config(folder)
        assert workflow.planned(*TARGETS) == set()

    return Workflow(make_once("staleness", make), *options)


@pytest.fixture
def stubs(make_once, tmp_path):
    """A copy of a build with a stub in place of each program, for one test."""
    options = ("--configfile", str(QUICK_FILE), "mine.yaml")
    built = make_once("stubs", lambda folder: build_stubs(Workflow(folder, *options)))
    return Workflow(built, *options).copy(tmp_path / "stubs")


@pytest.fixture(scope="module")
def plans(request, scratch):
    """A function that returns the rules that must run after a row's edit, by the specs of jobs.

    Nothing is built: what a stale result does to its readers is the matter of `dry_runs`.
    """
    before = scratch / f"{request.module.__name__}.before"
    copy_sources(before)
    write_inputs(before)
    with contextlib.chdir(before):
        built = keys_of(before, TARGETS)

    def plan(row):
        # Locks are remembered by their paths.
        folder = scratch / f"{id(row)}"
        subprocess.run(["cp", "-a", before, folder], check=True)
        try:
            row.edit(folder)
            with contextlib.chdir(folder):
                return {rule for rule, _ in keys_of(folder, row.targets) - built}
        finally:
            shutil.rmtree(folder)

    return plan


@pytest.fixture
def dry_runs(built, scratch):
    """A function that returns the rules that Snakemake plans after a row's edit."""

    def plan(row):
        tree = built.copy(scratch / f"{id(row)}")
        row.edit(tree.folder)
        planned = tree.planned(*row.targets)
        shutil.rmtree(tree.folder)
        return planned

    return plan
