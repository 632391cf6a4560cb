"""Results that are damaged, missing, touched or moved are stale or not, whatever their times."""

import os
import shutil
import time

from support.staleness import TINY, Row, fresh, rows


def touch_everything(folder):
    # Inputs become newer than results, and sources newer than all.
    now = time.time()
    for number, path in enumerate(sorted(folder.rglob("*"), reverse=True)):
        os.utime(path, (now - number, now - number), follow_symlinks=False)


def delete(result):
    shutil.rmtree((result / "manifest.json").resolve().parent)


def delete_the_manifest(result):
    result.with_name(f"{result.name}.manifest.json").unlink()


def delete_manifest_touch_inputs(result):
    # Snakemake looks through a missing result, and would compare the times of what is behind it.
    delete_the_manifest(result)
    for path in ("tokens/sft/tiny.manifest.json", "data/toy.manifest.json"):
        (result.parent.parent / path).touch()


def damaged(path, damage, rules, targets=TINY):
    """A row with a damaged result."""
    return Row(lambda folder: damage(folder / "output" / path), rules, targets)


SFT = ("output/sft/tiny",)
SFT_RULES = {"train_sft", "evaluate_sft", "draw_report"}
RESULTS = {
    "everything touched": fresh(touch_everything),
    ".snakemake deleted": fresh(lambda folder: shutil.rmtree(folder / ".snakemake")),
    # Results whose input is missing stay valid, unless the input itself is a target.
    "a model without its link": damaged("sft/tiny", delete_manifest_touch_inputs, set()),
    "a requested model deleted": damaged("sft/tiny", delete, SFT_RULES, SFT),
    # A build links them again, without a job. The report of the SFT model was never made.
    "a requested model without its link": damaged(
        "sft/tiny", delete_the_manifest, {"draw_report"}, SFT
    ),
}


@rows(RESULTS)
def test_a_dry_run_plans_what_is_missing_or_damaged(dry_runs, row):
    assert dry_runs(row) == row.rules
