"""Results that are damaged, missing, touched or left by failed jobs."""

import os
import shutil

from conftest import Workflow
from snakechat.workflow.manifest import UNLISTED_FILES
from support.staleness import (
    RULES,
    TARGETS,
    TINY,
    Row,
    fresh,
    put_the_clock_ahead,
    put_the_clock_back,
    rows,
    stale,
    touch_everything,
)

FRESH = {
    "everything touched": fresh(touch_everything),
    "a clock ahead of time": fresh(put_the_clock_ahead),
    "a clock behind time": fresh(put_the_clock_back),
    ".snakemake deleted": fresh(lambda folder: shutil.rmtree(folder / ".snakemake")),
}


@rows(FRESH)
def test_an_edit_that_changes_no_result_makes_nothing_stale(dry_runs, row):
    assert dry_runs(row) == row.rules


def test_a_copy_without_times_is_fresh(built, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(built.folder, folder, copy_function=shutil.copyfile, symlinks=True)
    assert Workflow(folder, *built.options).planned(*TARGETS) == set()


RESULTS = {
    "import_dataset": "data/toy",
    "split_dataset": "split/toy",
    "init_model": "models/tiny",
    "tokenize_sft": "tokens/sft/tiny",
    "train_sft": "sft/tiny",
    "evaluate_sft": "eval/sft/tiny",
    "tokenize_reward": "tokens/reward/tiny",
    "train_reward": "reward/tiny",
    "evaluate_reward": "eval/reward/tiny",
    "tokenize_dpo": "tokens/dpo/tiny",
    "compute_reference": "reference/tiny",
    "train_dpo": "dpo/tiny",
    "evaluate_dpo": "eval/dpo/tiny",
    "tokenize_rlhf": "tokens/rlhf/tiny",
    "train_rlhf": "rlhf/tiny",
    "evaluate_rlhf": "eval/rlhf/tiny",
    "draw_report": "report/rlhf/tiny",
    "check_gate": "gate/dpo/tiny",
    "prompt_eval": "prompt_eval/rlhf/tiny",
    "rw_eval": "rw_eval/reward/tiny",
    "compare_zero": "zero/sft/tiny",
    "compare_runs": "compare/dpo/tiny-vs-other",
    "tokenize_generations": "tokens/generations/tiny",
    "generate_responses": "generations/tiny",
    "score_responses": "scores/tiny",
    "select_responses": "data/picked",
    "label_pairs": "data/labelled",
}


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


def damaged(rule, damage, rules=None, targets=TINY):
    """A row with a damaged result, which makes the rule stale unless rules are named."""
    rules = stale(rule) if rules is None else rules
    return Row(lambda folder: damage(folder / "output" / RESULTS[rule]), rules, targets)


DAMAGES = (
    lengthen_a_file,
    cut_a_file,
    delete_a_file,
    cut_the_manifest,
)
DAMAGED = {f"{rule}: empty": damaged(rule, empty) for rule in RESULTS}
DAMAGED |= {f"train_sft: {damage.__name__}": damaged("train_sft", damage) for damage in DAMAGES}

# A result whose input lost its manifest stays valid, unless the input itself is a target. (The
# rule report has no command: it is the folder that users name.)
REQUESTED = {
    "train_dpo": stale("train_dpo"),
    "evaluate_dpo": stale("evaluate_dpo"),
    "train_rlhf": stale("train_rlhf"),
    "evaluate_rlhf": stale("evaluate_rlhf"),
    "draw_report": {"report", "draw_report"},
    "check_gate": {"check_gate"},
    "prompt_eval": {"prompt_eval"},
    "rw_eval": {"rw_eval"},
    "compare_zero": {"compare_zero"},
    "compare_runs": {"compare_runs"},
    "select_responses": {"select_responses"},
    "label_pairs": {"label_pairs"},
}
SFT_REQUESTED = {"train_sft", "evaluate_sft", "report", "draw_report"}, ("output/sft/tiny",)
DAMAGED |= {
    **{
        f"{rule}: delete_the_manifest": damaged(
            rule, delete_the_manifest, REQUESTED.get(rule, set())
        )
        for rule in RESULTS
    },
    "train_sft: delete_the_manifest, request it": damaged(
        "train_sft", delete_the_manifest, *SFT_REQUESTED
    ),
    "train_sft: delete": damaged("train_sft", delete, set()),
    "train_sft: delete, request it": damaged("train_sft", delete, *SFT_REQUESTED),
}


def test_every_result_of_the_tiny_recipes_is_damaged():
    assert RESULTS.keys() == RULES - {"fetch_model", "compute_teacher"}


@rows(DAMAGED)
def test_a_result_that_lost_files_is_stale(dry_runs, row):
    assert dry_runs(row) == row.rules
