"""Which files of a dataset belong to its splits."""

import pytest

from snakechat.data.dataset_files import kind_of, local_paths, matches, split_files
from snakechat.workflow.errors import InputError


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("data/train-00000-of-00001.parquet", "parquet"),
        ("data-00000-of-00001.arrow", "arrow"),
        ("train.jsonl.gz", "jsonl"),
        ("train.NDJSON.zst", "jsonl"),
        ("train.tsv", "tsv"),
        # Names that wget writes.
        ("train.parquet?download=true", "parquet"),
        ("train.json.zip", None),
        ("a.parquet/README", None),
    ],
)
def test_kind_is_read_from_the_name(path, kind):
    assert kind_of(path) == kind


def shards(numbers, of, name="data/train"):
    return [f"{name}-{number:05}-of-{of:05}-0a1b.parquet" for number in numbers]


SHARDS = [*shards([0, 1], 2), *shards([1, 2, 3], 3, "more/train")]
NO_ROWS = [
    ".cache/huggingface/download/train.json",
    ".train.parquet",
    "README.md",
    "cache-1f0a.parquet",
    "data/cache-0a1b/train.json",
    "data/dataset_info.json",
    "data/state.json",
    "dataset_dict.json",
    "dataset_infos.json",
]
THREE = ["test/a.jsonl", "train/a.jsonl", "train/b.jsonl"]


# Paths, globs, and the files of train and eval.
@pytest.mark.parametrize(
    ("paths", "globs", "train", "held_out"),
    [
        # The last word of a path decides, in any case.
        (["0/train.jsonl", "Train-set.jsonl"], {}, ["0/train.jsonl", "Train-set.jsonl"], None),
        (["0/train.jsonl", "test/train.jsonl"], {}, ["0/train.jsonl", "test/train.jsonl"], None),
        (["0/train.jsonl", "train_test.jsonl"], {}, ["0/train.jsonl"], ["train_test.jsonl"]),
        (["0/train.jsonl", "val_1.jsonl"], {}, ["0/train.jsonl"], ["val_1.jsonl"]),
        (["0/train.jsonl", "en/TEST/0000.jsonl"], {}, ["0/train.jsonl"], ["en/TEST/0000.jsonl"]),
        # Validation comes before test.
        (["test.csv", "train.csv", "validation.csv"], {}, ["train.csv"], ["validation.csv"]),
        (sorted([*NO_ROWS, "data/train.parquet"]), {}, ["data/train.parquet"], None),
        # Complete sets of shards: two, from 0 or 1, and with a digest as the hub names them.
        (SHARDS, {}, SHARDS, None),
        # Globs have precedence over words.
        (THREE, {"train": "**/a.jsonl"}, THREE[:2], None),
        (THREE, {"train": "test/*", "eval": "train/b.jsonl"}, THREE[:1], THREE[2:]),
    ],
)
def test_files_belong_to_splits(paths, globs, train, held_out):
    expected = {"train": train} | ({"eval": held_out} if held_out else {})
    assert split_files(paths, globs) == expected


@pytest.mark.parametrize(
    ("paths", "globs", "error"),
    [
        (
            ["README.md", "train.jsonl", "train.parquet"],
            {},
            "files of several kinds (jsonl, parquet): select the files to import by train:",
        ),
        ([".git/train.json", "state.json"], {}, "no training files: expected parquet"),
        (
            ["README.md", "data/validation.parquet"],
            {},
            "no training files: data/validation.parquet was read as eval, because of the split in"
            " its path: rename it, or set train: data/validation.parquet",
        ),
        (shards([0, 1], 3), {}, "data/train: 2 of 3 shards found, shard 2 is missing"),
        (shards([1, 3], 3), {}, "data/train: 2 of 3 shards found, shard 2 is missing"),
        # Of each split and folder.
        ([*shards([0, 1], 2), *shards([1], 2, "data/test")], {}, "data/test: 1 of 2 shards"),
        ([*shards([0, 1], 2), *shards([0], 2, "more/train")], {}, "more/train: 1 of 2 shards"),
        (
            ["a.csv", "b.csv"],
            {"train": "*.csv", "eval": "b.csv"},
            "b.csv is both in the train and in the eval split: ",
        ),
        (["train.csv"], {"train": "*.parquet"}, "train: no file matches '*.parquet'"),
    ],
)
def test_incomplete_and_ambiguous_splits_are_errors(paths, globs, error):
    with pytest.raises(InputError) as found:
        split_files(paths, globs)
    assert str(found.value).startswith(error)


@pytest.mark.parametrize(
    ("glob", "path", "is_match"),
    [
        ("**/*.parquet", "c.parquet", True),
        ("a/**/c.parquet", "a/c.parquet", True),
        ("a/**/c.parquet", "a/b/b/c.parquet", True),
        ("train-?.csv", "train-1.csv", True),
        ("*.parquet?download=true", "a.parquet?download=true", True),
        ("a+(b).csv", "a+(b).csv", True),
        ("train.parquet", "trainxparquet", False),
        ("*.parquet", "data/train.parquet", False),
        ("*.parquet", "train.parquet.lock", False),
        ("a/**/c.parquet", "a/bc.parquet", False),
        ("train-?.csv", "train-.csv", False),
        ("a?b.csv", "a/b.csv", False),
    ],
)
def test_globs_match_as_those_of_pathlib(glob, path, is_match):
    assert matches(path, glob) == is_match


# --- links ----------------------------------------------------------------------------------


def fill(folder, *paths):
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("{}\n")
    return folder


def test_folders_that_link_to_one_another_are_read_once(tmp_path):
    names = "abcdef"
    fill(tmp_path, *(f"{name}/x.json" for name in names))
    for name in names:
        (tmp_path / name / "to_all").symlink_to(tmp_path)
        for other in names:
            (tmp_path / name / f"to_{other}").symlink_to(tmp_path / other)
    found = local_paths(tmp_path)
    assert {f"{name}/x.json" for name in names} <= set(found)
    # Each folder itself, and the first link to it.
    assert len(found) == 2 * len(names)
    (tmp_path / "self").symlink_to("self")
    assert set(local_paths(tmp_path)) == {*found, "self"}


def test_a_folder_that_contains_itself_by_a_link_is_read_once(tmp_path):
    fill(tmp_path, "data/x.json")
    (tmp_path / "data/all").symlink_to(tmp_path / "data")
    assert local_paths(tmp_path) == ["data/x.json"]


def test_link_to_a_folder_outside_is_an_error(tmp_path):
    folder = fill(tmp_path / "mine", "data/x.json")
    fill(tmp_path / "other", "y.json")
    (folder / "inside").symlink_to("data")
    (tmp_path / "link").symlink_to(folder)
    for name in ("mine", "link"):
        assert local_paths(tmp_path / name) == ["data/x.json", "inside/x.json"]
    (folder / "outside").symlink_to(tmp_path / "other")
    with pytest.raises(InputError, match=r"outside is a link to .*/other, outside of the folder"):
        local_paths(folder)
