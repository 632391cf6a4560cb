"""Which files of a dataset belong to its splits."""

import pytest

from snakechat.data.dataset_files import kind_of, local_paths, matches, split_files
from snakechat.workflow.errors import InputError


def splits_of(*paths, **globs):
    return split_files(sorted(paths), globs)


def error_of(*paths, **globs):
    with pytest.raises(InputError) as error:
        splits_of(*paths, **globs)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("data/train-00000-of-00001.parquet", "parquet"),
        ("data-00000-of-00001.arrow", "arrow"),
        ("train.jsonl.gz", "jsonl.gz"),
        # Names that wget writes.
        ("train.parquet?download=true", "parquet"),
        ("a.json/train.csv", "csv"),
        ("train.json.zip", None),
        ("a.parquet/README", None),
        ("train.xjson", None),
    ],
)
def test_kind_is_read_from_the_name(path, kind):
    assert kind_of(path) == kind


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("Train-set.jsonl", "train"),
        ("val_1.jsonl", "eval"),
        ("dev.jsonl", "eval"),
        ("TEST.jsonl", "eval"),
        ("en/test/0000.jsonl", "eval"),
        # The last word decides.
        ("test/train.jsonl", "train"),
        ("train_test.jsonl", "eval"),
    ],
)
def test_last_word_of_a_path_names_the_split(name, split):
    found = splits_of("0/rows/train.jsonl", name)
    if split == "train":
        assert found == {"train": ["0/rows/train.jsonl", name]}
    else:
        assert found == {"train": ["0/rows/train.jsonl"], "eval": [name]}


def test_validation_comes_before_test():
    assert splits_of("train.csv", "test.csv", "validation.csv") == {
        "train": ["train.csv"],
        "eval": ["validation.csv"],
    }
    assert splits_of("train.csv", "test.csv") == {"train": ["train.csv"], "eval": ["test.csv"]}


def test_files_without_rows_are_skipped():
    found = splits_of(
        ".cache/huggingface/download/train.json",
        ".git/train.json",
        ".gitattributes",
        ".train.parquet",
        "LICENSE",
        "README.md",
        "cache-1f0a.parquet",
        "data/.hidden/train.json",
        "data/cache-0a1b/train.json",
        "data/dataset_info.json",
        "data/state.json",
        "data/train.parquet",
        "dataset_dict.json",
        "dataset_infos.json",
        "load.py",
    )
    assert found == {"train": ["data/train.parquet"]}


def test_files_of_several_kinds_are_an_error():
    message = error_of("train.parquet", "train.jsonl", "README.md")
    assert "jsonl, parquet" in message
    # The advice.
    assert "train:" in message
    # Compressed lines are another kind.
    assert "jsonl, jsonl.gz" in error_of("train.jsonl", "test.jsonl.gz")


@pytest.mark.parametrize("paths", [[], [".git/train.json", "state.json"]])
def test_folder_without_data_files_is_an_error(paths):
    assert error_of(*paths).startswith("no training files: expected parquet")


def test_eval_files_alone_are_an_error():
    assert error_of("data/validation.parquet", "README.md") == (
        "no training files: data/validation.parquet was read as eval, because of the split in its"
        " path: rename it, or set train: data/validation.parquet"
    )
    assert error_of("test.jsonl").startswith("no training files: test.jsonl was read as eval")


# --- shards ---------------------------------------------------------------------------------


def shards(numbers, of, name="data/train", end=".parquet"):
    return [f"{name}-{number:05}-of-{of:05}{end}" for number in numbers]


@pytest.mark.parametrize(("numbers", "of"), [([0, 1, 2], 3), ([1, 2, 3], 3)])
def test_complete_sets_of_shards(numbers, of):
    paths = shards(numbers, of)
    assert splits_of(*paths) == {"train": paths}
    # With a digest after the number, as the hub names shards.
    paths = [f"data/train-{n:05}-of-{of:05}-{n:016x}.parquet" for n in numbers]
    assert splits_of(*paths) == {"train": paths}


@pytest.mark.parametrize(
    ("numbers", "of", "missing"),
    [
        ([0, 1], 3, 2),
        ([1, 3], 3, 2),
        ([0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11], 12, 4),
    ],
)
def test_missing_shard_is_an_error_with_its_number(numbers, of, missing):
    message = error_of(*shards(numbers, of))
    assert message.startswith("data/train: ")
    assert f"{len(numbers)} of {of} shards found" in message
    assert f"shard {missing} is missing" in message


def test_shards_are_checked_per_split_and_folder():
    whole = shards([0, 1], 2)
    assert error_of(*whole, *shards([1], 2, "data/test")).startswith("data/test: ")
    assert error_of(*whole, *shards([0], 2, "more/train")).startswith("more/train: ")
    # Two sets of shards in one split.
    found = splits_of(*whole, *shards([0, 1, 2], 3, "more/train"))
    assert len(found["train"]) == 5


# --- globs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("glob", "path", "is_match"),
    [
        ("*.parquet", "train.parquet", True),
        ("**/*.parquet", "c.parquet", True),
        ("a/**/c.parquet", "a/c.parquet", True),
        ("a/**/c.parquet", "a/b/b/c.parquet", True),
        ("train-?.csv", "train-1.csv", True),
        ("*.parquet?download=true", "a.parquet?download=true", True),
        ("a+(b).csv", "a+(b).csv", True),
        ("数据/*.json", "数据/训练.json", True),
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


def test_globs_override_split_words():
    paths = ["test/a.jsonl", "train/a.jsonl", "train/b.jsonl"]
    assert splits_of(*paths, train="**/a.jsonl") == {"train": ["test/a.jsonl", "train/a.jsonl"]}
    assert splits_of(*paths, train="test/*", eval="train/b.jsonl") == {
        "train": ["test/a.jsonl"],
        "eval": ["train/b.jsonl"],
    }


def test_a_file_of_both_splits_is_an_error():
    message = error_of("a.csv", "b.csv", train="*.csv", eval="b.csv")
    assert message.startswith("b.csv is both in the train and in the eval split: ")


@pytest.mark.parametrize(
    ("globs", "split", "glob"),
    [
        ({"train": "*.parquet"}, "train", "*.parquet"),
        ({"train": "train.csv", "eval": "dev/*.csv"}, "eval", "dev/*.csv"),
    ],
)
def test_glob_without_a_match_is_an_error(globs, split, glob):
    message = error_of("train.csv", "test.csv", **globs)
    assert message.startswith(f"{split}: ")
    assert glob in message


# --- layouts of folders and repositories ----------------------------------------------------


def fill(folder, *paths):
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("{}\n")
    return folder


def test_local_paths_follow_links(tmp_path):
    # A folder on another disk, and a cache of the hub, whose files are links to blobs.
    store = fill(tmp_path / "store", "rows/train.json", "blob")
    folder = fill(tmp_path / "mine", "README.md")
    (folder / "data").symlink_to(store / "rows")
    (folder / "test.json").symlink_to(store / "blob")
    assert local_paths(folder) == ["README.md", "data/train.json", "test.json"]
    (tmp_path / "link").symlink_to(folder)
    assert local_paths(tmp_path / "link") == local_paths(folder)


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


def test_link_to_a_folder_outside_is_an_error_unless_links_are_followed(tmp_path):
    folder = fill(tmp_path / "mine", "data/x.json")
    fill(tmp_path / "other", "y.json")
    (folder / "inside").symlink_to("data")
    assert local_paths(folder, follow_links=False) == ["data/x.json", "inside/x.json"]
    (folder / "outside").symlink_to(tmp_path / "other")
    with pytest.raises(InputError, match=r"outside is a link to .*/other, outside of the folder"):
        local_paths(folder, follow_links=False)
    assert local_paths(folder)[-1] == "outside/y.json"
