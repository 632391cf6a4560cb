"""Files outside the project make exactly the results stale that were made from them."""

import os
import shutil

from support.staleness import (
    COPIED,
    IMPORTED,
    MINE,
    NEAR,
    Row,
    edit_a_row,
    fresh,
    lines,
    move_the_model,
    nested,
    replaced,
    rows,
    write_config,
)


def replace_a_file_by_an_older_one(folder):
    # As cp -p or rsync -t would leave it.
    edit_a_row(folder)
    os.utime(folder / "mine/train-1.jsonl", (1, 1))


def append_a_row(folder):
    with (folder / "mine/train-2.jsonl").open("a") as file:
        file.write(lines(99))


def edit_the_eval_split(folder):
    (folder / "mine/test.jsonl").write_text(lines(*range(60, 80)))


def add_a_file(folder):
    (folder / "mine/train-4.jsonl").write_text(lines(99))


def remove_a_file(folder):
    (folder / "mine/train-2.jsonl").unlink()


def exchange_two_files(folder):
    first, second = folder / "mine/train-1.jsonl", folder / "mine/train-2.jsonl"
    first.rename(folder / "mine/kept")
    second.rename(first)
    (folder / "mine/kept").rename(second)


def retarget_a_link(folder):
    (folder / "mine/train-3").unlink()
    (folder / "mine/train-3").symlink_to("../another", target_is_directory=True)


def edit_behind_a_link(folder):
    (folder / "one/rows.jsonl").write_text(lines(*range(90, 100)))


def edit_weights(folder):
    path = folder / "model/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")


CHANGES = (
    edit_a_row,
    replace_a_file_by_an_older_one,
    append_a_row,
    edit_the_eval_split,
    add_a_file,
    remove_a_file,
    exchange_two_files,
    retarget_a_link,
    edit_behind_a_link,
)
CONTENTS = {change.__name__: Row(change, IMPORTED, (MINE,)) for change in CHANGES} | {
    "edit_a_tokenizer": Row(
        replaced("tokenizer/tokenizer.json", ("<unk>", "<UNK>")), {"init_model"}, (COPIED,)
    ),
    "edit_a_model": Row(edit_weights, {"fetch_model"}, (NEAR,)),
    "edit_prompts": Row(replaced("prompts/toy.yaml", ("Pia", "Max")), {"prompt_eval"}),
    "edit_pairs": Row(replaced("prompts/pairs/toy.yaml", ("Pia", "Max")), {"rw_eval"}),
    "edit_prompts_of_another_set": Row(replaced("prompts/en.yaml", ("basil", "mint")), set()),
}


@rows(CONTENTS)
def test_files_with_other_content_are_read_again(dry_runs, row):
    assert dry_runs(row) == row.rules


def test_an_edit_that_sets_size_and_time_back_is_seen(copy):
    # The digest of the file is cached now.
    assert copy.planned(MINE) == set()
    path = copy.folder / "mine/train-1.jsonl"
    before = path.stat()
    edit_a_row(copy.folder)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert copy.planned(MINE) == IMPORTED


# --- edits without effect -------------------------------------------------------------------


def move_the_dataset(folder):
    # Under another name, without times, with a file instead of a link, and next to another file.
    shutil.copytree(folder / "mine", folder / "moved", copy_function=shutil.copyfile)
    shutil.rmtree(folder / "mine")
    (folder / "moved/README.md").write_text("# Mine\n")
    write_config(folder, nested("datasets.mine.path", str(folder / "moved")))


def move_the_tokenizer(folder):
    (folder / "tokenizer").rename(folder / "moved")
    write_config(folder, nested("models.copied.tokenizer.path", "moved"))


FRESH = {
    "a dataset moved": fresh(move_the_dataset),
    "a tokenizer moved": fresh(move_the_tokenizer),
    "a model moved": fresh(move_the_model),
}


@rows(FRESH)
def test_an_edit_that_changes_no_result_makes_nothing_stale(dry_runs, row):
    assert dry_runs(row) == row.rules
