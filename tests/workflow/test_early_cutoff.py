"""The jobs that really run after an edit: those whose own spec or inputs have other content.

The programs are stubs whose output is a constant, so that builds take seconds.
"""

import json
import shutil

import pytest

from conftest import Workflow
from support.cases import some
from support.staleness import (
    CONFIG,
    OURS,
    QUICK,
    READERS,
    TINY,
    build_stubs,
    merged,
    program_of,
)

STUB = '''"""Write a constant."""

from snakechat.workflow.job import run

CONTENT = "first"


def main(job):
    """Write the constant, and the files that rules and model cards read."""
    (job.result / "content.txt").write_text(CONTENT)
    (job.result / "metrics.json").write_text("{}")
    (job.result / "metrics.jsonl").write_text('{"step": 1}')
    for page in ("record.html", "zero.md", "comparison.html", "responses.html", "scores.html"):
        (job.result / page).touch()


run(main)
'''
# A refactoring that the digest counts, and the same with other output.
REFACTORED = STUB.replace('"first"', '"fir" + "st"')
CHANGED = STUB.replace('"first"', '"second"')

# Rules whose programs show what their inputs were made from.
PAGES = {"draw_report", "write_record", "compare_runs"}
# The programs of the tiny recipes that other jobs read, with their rules.
PROGRAMS = {}
for name, readers in READERS.items():
    if readers and name != "fetch_model":
        PROGRAMS.setdefault(program_of(name).name, set()).add(name)
# A program of each kind. Exhaustive tests have the others.
KINDS = ("tokenize_phase.py", "train_sft.py")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A build of stubs."""
    workflow = Workflow(tmp_path_factory.mktemp("cutoff") / "work")
    build_stubs(workflow, STUB, merged(CONFIG, QUICK, OURS), TINY)
    return workflow


@pytest.fixture
def tree(built, tmp_path):
    """A copy of it, for one test."""
    return built.copy(tmp_path / "tree")


def records(workflow):
    """Return the record of each run that made a result, by path."""
    paths = (workflow.folder / "output").rglob("run.json")
    return {path: (path.stat().st_mtime_ns, path.read_text()) for path in paths}


def rules_that_ran(workflow, *targets):
    """Build targets; return the rules whose programs ran."""
    before = records(workflow)
    workflow.build(*targets)
    ran = [path for path, record in records(workflow).items() if before.get(path) != record]
    manifests = [json.loads(path.with_name("manifest.json").read_text()) for path in ran]
    return {manifest["spec"]["rule"] for manifest in manifests}


def with_pages(rules):
    """Return rules, and the pages that show what their results were made from."""
    return rules | {reader for rule in rules for reader in READERS[rule] & PAGES}


def edited(program):
    """Return the rules whose specs an edit of a program changes."""
    # The comparison of ZeRO stages repeats the training of SFT.
    return PROGRAMS[program] | ({"compare_zero"} if program == "train_sft.py" else set())


@some(PROGRAMS, KINDS, "program")
def test_after_a_refactoring_with_the_same_output_nothing_else_runs(tree, program):
    (tree.folder / "scripts" / program).write_text(REFACTORED)
    assert rules_that_ran(tree, *TINY) == with_pages(edited(program))
    assert tree.planned(*TINY) == set()


@some(PROGRAMS, KINDS, "program")
def test_other_output_reaches_as_far_as_it_changes_others(tree, program):
    (tree.folder / "scripts" / program).write_text(CHANGED)
    rules = edited(program)
    readers = {reader for rule in rules for reader in READERS[rule]}
    assert rules_that_ran(tree, *TINY) == with_pages(rules | readers)
    assert tree.planned(*TINY) == set()


def delete(tree, path):
    """Delete a result with its earlier versions, and the path that leads to it."""
    link = tree.folder / "output" / path
    shutil.rmtree(link.resolve().parent)
    link.unlink()
    link.with_name(f"{link.name}.manifest.json").unlink()


def test_a_deleted_intermediate_whose_program_changed_is_built_and_compared(tree):
    delete(tree, "tokens/sft/tiny")
    (tree.folder / "scripts/tokenize_phase.py").write_text(REFACTORED)
    assert rules_that_ran(tree, "output/sft/tiny.manifest.json") == {"tokenize_sft"}
    assert tree.planned("output/sft/tiny.manifest.json") == set()
