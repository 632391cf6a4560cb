"""The jobs that really run after an edit: those whose own spec or inputs have other content.

The programs are stubs whose output is a constant, so that builds take seconds.
"""

import json
import shutil

from support.cases import some
from support.staleness import READERS, STUB, TINY, program_of

# A refactoring that the digest counts, and the same with other output.
REFACTORED = STUB.replace('"first"', '"fir" + "st"')
CHANGED = STUB.replace('"first"', '"second"')

# Rules whose programs show what their inputs were made from.
PAGES = {"draw_report", "compare_runs"}
# The programs of the tiny recipes that other jobs read, with their rules.
PROGRAMS = {}
for name, readers in READERS.items():
    if readers and name != "fetch_model":
        PROGRAMS.setdefault(program_of(name).name, set()).add(name)
# A program of each kind. Exhaustive tests have the others.
KINDS = ("tokenize_phase.py", "train_sft.py")


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


@some(PROGRAMS, KINDS, "program")
def test_after_a_refactoring_with_the_same_output_nothing_else_runs(stubs, program):
    (stubs.folder / "scripts" / program).write_text(REFACTORED)
    assert rules_that_ran(stubs, *TINY) == with_pages(PROGRAMS[program])
    assert stubs.planned(*TINY) == set()


@some(PROGRAMS, KINDS, "program")
def test_other_output_reaches_as_far_as_it_changes_others(stubs, program):
    (stubs.folder / "scripts" / program).write_text(CHANGED)
    rules = PROGRAMS[program]
    readers = {reader for rule in rules for reader in READERS[rule]}
    assert rules_that_ran(stubs, *TINY) == with_pages(rules | readers)
    assert stubs.planned(*TINY) == set()


def delete(stubs, path):
    """Delete a result with its earlier versions, and the path that leads to it."""
    link = stubs.folder / "output" / path
    shutil.rmtree(link.resolve().parent)
    link.unlink()
    link.with_name(f"{link.name}.manifest.json").unlink()


def test_a_deleted_intermediate_whose_program_changed_is_built_and_compared(stubs):
    delete(stubs, "tokens/sft/tiny")
    (stubs.folder / "scripts/tokenize_phase.py").write_text(REFACTORED)
    assert rules_that_ran(stubs, "output/sft/tiny.manifest.json") == {"tokenize_sft"}
    assert stubs.planned("output/sft/tiny.manifest.json") == set()
