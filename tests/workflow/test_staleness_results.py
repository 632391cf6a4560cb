"""Results that are damaged, missing, touched or moved are stale or not, whatever their times."""

import os
import shutil

from conftest import Workflow
from snakechat.workflow.manifest import UNLISTED_FILES
from support.staleness import (
    IMPORTED,
    MINE,
    TARGETS,
    TINY,
    Row,
    edit_a_row,
    fresh,
    put_the_clock_ahead,
    put_the_clock_back,
    rows,
    stale,
    touch_everything,
)


def empty(result):
    for file in files_of(result):
        file.unlink()


def delete(result):
    shutil.rmtree(result.resolve())


def lengthen_a_file(result):
    with next(files_of(result)).open("a") as file:
        file.write(" ")


def cut_a_file(result):
    os.truncate(next(files_of(result)), 1)


def delete_a_file(result):
    next(files_of(result)).unlink()


def delete_the_manifest(result):
    result.with_name(f"{result.name}.manifest.json").unlink()


def cut_the_manifest(result):
    os.truncate(result.with_name(f"{result.name}.manifest.json"), 500)


def files_of(result):
    """Return the files that the manifest of a result lists."""
    files = (path for path in sorted(result.iterdir()) if path.is_file())
    return (path for path in files if path.name not in UNLISTED_FILES)


def damaged(path, damage, rules, targets=TINY):
    """A row with a damaged result."""
    return Row(lambda folder: damage(folder / "output" / path), rules, targets)


RESULTS = {
    "everything touched": fresh(touch_everything),
    "a clock ahead of time": fresh(put_the_clock_ahead),
    "a clock behind time": fresh(put_the_clock_back),
    ".snakemake deleted": fresh(lambda folder: shutil.rmtree(folder / ".snakemake")),
    **{
        f"{damage.__name__} of a model": damaged("sft/tiny", damage, stale("train_sft"))
        for damage in (empty, lengthen_a_file, cut_a_file, delete_a_file, cut_the_manifest)
    },
    "records emptied": damaged("data/toy", empty, stale("import_dataset")),
    "an evaluation emptied": damaged("eval/dpo/tiny", empty, stale("evaluate_dpo")),
    "a page emptied": damaged("rw_eval/reward/tiny", empty, {"rw_eval"}),
    # Results whose input is missing stay valid, unless the input itself is a target.
    "a model without its manifest": damaged("sft/tiny", delete_the_manifest, set()),
    "a model deleted": damaged("sft/tiny", delete, set()),
    **{
        f"{damage.__name__} of a model that is requested": damaged(
            "sft/tiny",
            damage,
            {"train_sft", "evaluate_sft", "report", "draw_report"},
            ("output/sft/tiny",),
        )
        for damage in (delete, delete_the_manifest)
    },
    "a model of a target without its manifest": damaged(
        "rlhf/tiny", delete_the_manifest, stale("train_rlhf")
    ),
    "a report without its manifest": damaged(
        # The rule report has no command: it is the folder that users name.
        "report/rlhf/tiny",
        delete_the_manifest,
        {"report", "draw_report"},
    ),
    "a gate without its manifest": damaged("gate/dpo/tiny", delete_the_manifest, {"check_gate"}),
}


@rows(RESULTS)
def test_a_dry_run_plans_what_is_missing_or_damaged(dry_runs, row):
    assert dry_runs(row) == row.rules


def test_a_copy_without_times_is_fresh(built, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(built.folder, folder, copy_function=shutil.copyfile, symlinks=True)
    assert Workflow(folder, *built.options).planned(*TARGETS) == set()


def test_an_edit_that_sets_size_and_time_back_is_seen(copy):
    # The digest of the file is cached now.
    assert copy.planned(MINE) == set()
    path = copy.folder / "mine/train-1.jsonl"
    before = path.stat()
    edit_a_row(copy.folder)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert copy.planned(MINE) == IMPORTED
