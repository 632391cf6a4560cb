"""The jobs that really run after an edit: those whose own spec or inputs have other content.

The programs are stubs whose output is a constant, so that builds take seconds.
"""

import json

from support.staleness import STUB, TINY, TOKENIZERS, readers

# A refactoring that the digest counts, and the same with other output.
REFACTORED = STUB.replace('"first"', '"fir" + "st"')
CHANGED = STUB.replace('"first"', '"second"')

# Rules whose programs show what their inputs were made from.
PAGES = {"draw_report", "draw_page"}


def records(workflow):
    """Return the record of each run that made a result, by path."""
    paths = (workflow.folder / "output/store").rglob("run.json")
    return {path: (path.stat().st_mtime_ns, path.read_text()) for path in paths}


def rules_that_ran(workflow, *TINY):
    """Build targets; return the rules whose programs ran."""
    before = records(workflow)
    workflow.build(*TINY)
    ran = [path for path, record in records(workflow).items() if before.get(path) != record]
    manifests = [json.loads(path.with_name("manifest.json").read_text()) for path in ran]
    return {manifest["spec"]["rule"] for manifest in manifests}


def with_pages(rules):
    """Return rules, and the pages that show what their results were made from."""
    return rules | {reader for rule in rules for reader in readers(rule) & PAGES}


def test_an_edit_reaches_as_far_as_it_changes_outputs(stubs):
    """The edit of a program of several rules, and of one that reads what they make."""
    rules = TOKENIZERS | {"train_sft"}
    for text, ran in ((REFACTORED, rules), (CHANGED, rules.union(*map(readers, rules)))):
        for program in ("tokenize_phase.py", "train_sft.py"):
            (stubs.folder / "scripts" / program).write_text(text)
        assert rules_that_ran(stubs, *TINY) == with_pages(ran)
        assert stubs.planned(*TINY) == set()
