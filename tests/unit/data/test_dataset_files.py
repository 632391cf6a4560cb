"""Which files of a dataset belong to its splits."""

import os

import pytest
import yaml

from conftest import ROOT
from snakechat.data.dataset_files import kind_of, local_paths, matches, split_files, unread_files
from snakechat.workflow.errors import InputError

DATASETS = yaml.safe_load((ROOT / "config.yaml").read_text())["datasets"]


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
        ("train.jsonl", "jsonl"),
        ("train.jsonl.gz", "jsonl.gz"),
        ("train.json", "json"),
        ("train.csv", "csv"),
        # Names that wget writes.
        ("train.parquet?download=true", "parquet"),
        ("train.jsonl.gz?download=true", "jsonl.gz"),
        ("a.json/train.csv", "csv"),
        ("README.md", None),
        ("train.json.zip", None),
        ("train.parquet.lock", None),
        ("train.csv?download=false", None),
        ("a.parquet/README", None),
        ("train.xjson", None),
    ],
)
def test_kind_is_read_from_the_name(path, kind):
    assert kind_of(path) == kind


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("training.jsonl", "train"),
        ("train2.jsonl", "train"),
        ("Train-set.jsonl", "train"),
        ("validation.jsonl", "eval"),
        ("valid.jsonl", "eval"),
        ("val_1.jsonl", "eval"),
        ("dev.jsonl", "eval"),
        ("my-eval.jsonl", "eval"),
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


@pytest.mark.parametrize("name", ["latest", "devil", "attestation"])
def test_words_inside_other_words_do_not_count(name):
    # A file without a split word is train only if no other file is.
    assert splits_of(f"{name}.jsonl", "test.jsonl")["train"] == [f"{name}.jsonl"]
    assert splits_of(f"{name}.jsonl", "train.jsonl")["train"] == ["train.jsonl"]


def test_validation_comes_before_test():
    assert splits_of("train.csv", "test.csv", "validation.csv") == {
        "train": ["train.csv"],
        "eval": ["validation.csv"],
    }
    assert splits_of("train.csv", "test.csv") == {"train": ["train.csv"], "eval": ["test.csv"]}


def test_files_without_a_split_word_are_train():
    assert splits_of("en.jsonl", "de.jsonl", "test.jsonl") == {
        "train": ["de.jsonl", "en.jsonl"],
        "eval": ["test.jsonl"],
    }


def test_eval_split_is_absent_without_eval_files():
    assert splits_of("train.jsonl") == {"train": ["train.jsonl"]}
    assert splits_of("rows.jsonl", "README.md") == {"train": ["rows.jsonl"]}


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


def test_names_that_contain_cache_are_kept():
    assert splits_of("my-cache-1.json", "a/state.json.json")["train"] == [
        "a/state.json.json",
        "my-cache-1.json",
    ]


def test_files_of_several_kinds_are_an_error():
    message = error_of("train.parquet", "train.jsonl", "README.md")
    assert "jsonl, parquet" in message
    # The advice.
    assert "train:" in message
    # Compressed lines are another kind.
    assert "jsonl, jsonl.gz" in error_of("train.jsonl", "test.jsonl.gz")


def test_globs_may_select_files_of_several_kinds():
    paths = ["a.csv", "train.jsonl", "train.parquet"]
    assert splits_of(*paths, train="*.jsonl", eval="*.csv") == {
        "train": ["train.jsonl"],
        "eval": ["a.csv"],
    }


@pytest.mark.parametrize("paths", [[], ["README.md"], [".git/train.json", "state.json"]])
def test_folder_without_data_files_is_an_error(paths):
    assert error_of(*paths).startswith("no training files: expected parquet")


def test_eval_files_alone_are_an_error():
    assert error_of("data/validation.parquet", "README.md") == (
        "no training files: data/validation.parquet was read as eval, because of the split in its"
        " path: rename it, or set train: data/validation.parquet"
    )
    assert error_of("test.jsonl").startswith("no training files: test.jsonl was read as eval")


def test_files_of_other_kinds_alone_are_named():
    assert error_of("a.tsv", "b.jsonl.zst", "README.md").endswith("csv, found a.tsv and 1 more")


# --- files that are not read ----------------------------------------------------------------


def unread(*paths):
    paths = sorted(paths)
    return unread_files(paths, split_files(paths, {}))


@pytest.mark.parametrize("path", ["b.jsonl.zst", "data/train-d.tsv"])
def test_files_of_other_kinds_are_named(path):
    assert unread("train.jsonl", path) == (
        f"not read: {path}: expected parquet, arrow, jsonl, jsonl.gz, json or csv: convert or"
        " delete it"
    )


def test_files_that_are_not_read_for_two_reasons_are_named_in_one_line():
    remark = unread("train.jsonl", "more.jsonl", "a.tsv", "b.tsv")
    assert remark == (
        "not read: more.jsonl, because other files have train in their path: rename them, or select"
        " the files by train:; a.tsv and 1 more: expected parquet, arrow, jsonl, jsonl.gz, json or"
        " csv: convert or delete it"
    )


def test_no_remark_without_files_that_may_have_rows():
    described = ["README.md", "LICENSE", "licence.txt", "load.py", "CITATION.cff", "plot.png"]
    cached = [".gitattributes", ".cache/a.tsv", "cache-1f.arrow", "dataset_info.json"]
    assert unread("train.jsonl", "validation.jsonl", "test.jsonl", *described, *cached) is None


# --- shards ---------------------------------------------------------------------------------


def shards(numbers, of, name="data/train", end=".parquet"):
    return [f"{name}-{number:05}-of-{of:05}{end}" for number in numbers]


@pytest.mark.parametrize(
    ("numbers", "of"), [([0, 1, 2], 3), ([1, 2, 3], 3), ([1], 1), (range(12), 12)]
)
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


def test_missing_first_shard_is_an_error():
    # Without shard 0, the shards may be numbered from 0 or from 1.
    assert "2 of 3 shards" in error_of(*shards([1, 2], 3))
    assert "1 of 3 shards found, shard 1 is missing" in error_of(*shards([2], 3))
    assert "2 of 3 shards found, shard 1 is missing" in error_of(*shards([2, 3], 3))


def test_shards_are_checked_per_split_and_folder():
    whole = shards([0, 1], 2)
    assert error_of(*whole, *shards([1], 2, "data/test")).startswith("data/test: ")
    assert error_of(*whole, *shards([0], 2, "more/train")).startswith("more/train: ")
    # Two sets of shards in one split.
    found = splits_of(*whole, *shards([0, 1, 2], 3, "more/train"))
    assert len(found["train"]) == 5


def test_missing_shard_of_a_glob_is_an_error():
    message = error_of(*shards([0, 1], 3, end=".jsonl"), train="data/*.jsonl")
    assert "shard 2 is missing" in message


# --- globs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("glob", "path"),
    [
        ("*.parquet", "train.parquet"),
        ("data/*.parquet", "data/train-0.parquet"),
        ("*/train.jsonl.gz", "harmless-base/train.jsonl.gz"),
        ("**/*.parquet", "a/b/c.parquet"),
        ("**/*.parquet", "c.parquet"),
        ("a/**/c.parquet", "a/c.parquet"),
        ("a/**/c.parquet", "a/b/b/c.parquet"),
        ("a/**/*.parquet", "a/b/c.parquet"),
        ("train-?.csv", "train-1.csv"),
        ("train-??.csv", "train-12.csv"),
        ("*.parquet?download=true", "a.parquet?download=true"),
        ("a+(b).csv", "a+(b).csv"),
        ("数据/*.json", "数据/训练.json"),
    ],
)
def test_globs_that_match(glob, path):
    assert matches(path, glob)


@pytest.mark.parametrize(
    ("glob", "path"),
    [
        ("train.parquet", "trainxparquet"),
        ("train.parquet", "data/train.parquet"),
        ("*.parquet", "data/train.parquet"),
        ("*.parquet", "train.parquet.lock"),
        ("*/train.jsonl.gz", "a/b/train.jsonl.gz"),
        ("a/**/c.parquet", "ab/c.parquet"),
        ("a/**/c.parquet", "a/bc.parquet"),
        ("train-?.csv", "train-.csv"),
        ("train-?.csv", "train-12.csv"),
        ("a?b.csv", "a/b.csv"),
    ],
)
def test_globs_that_do_not_match(glob, path):
    assert not matches(path, glob)


def test_globs_override_split_words():
    paths = ["test/a.jsonl", "train/a.jsonl", "train/b.jsonl"]
    assert splits_of(*paths, train="**/a.jsonl") == {"train": ["test/a.jsonl", "train/a.jsonl"]}
    assert splits_of(*paths, train="test/*", eval="train/b.jsonl") == {
        "train": ["test/a.jsonl"],
        "eval": ["train/b.jsonl"],
    }


def test_train_glob_alone_gives_no_eval_split():
    assert splits_of("train.csv", "test.csv", train="train.*") == {"train": ["train.csv"]}


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


def test_file_in_both_splits_is_an_error():
    # Training rows would be evaluated.
    assert "test.parquet" in error_of(
        "test.parquet", "train.parquet", train="*.parquet", eval="test.parquet"
    )


# --- layouts of folders and repositories ----------------------------------------------------


def fill(folder, *paths):
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("{}\n")
    return folder


def test_local_paths_are_relative_and_sorted(tmp_path):
    fill(tmp_path, "b/c/x.json", "a.json", "b/y.json", "README.md")
    assert local_paths(tmp_path) == ["README.md", "a.json", "b/c/x.json", "b/y.json"]
    assert local_paths(str(tmp_path)) == local_paths(tmp_path)


def test_local_paths_follow_links(tmp_path):
    # A folder on another disk, and a cache of the hub, whose files are links to blobs.
    store = fill(tmp_path / "store", "rows/train.json", "blob")
    folder = fill(tmp_path / "mine", "README.md")
    (folder / "data").symlink_to(store / "rows")
    (folder / "test.json").symlink_to(store / "blob")
    assert local_paths(folder) == ["README.md", "data/train.json", "test.json"]
    (tmp_path / "link").symlink_to(folder)
    assert local_paths(tmp_path / "link") == local_paths(folder)


def test_link_to_a_parent_folder_does_not_repeat_files(tmp_path):
    fill(tmp_path, "data/train.json")
    (tmp_path / "data/here").symlink_to(tmp_path, target_is_directory=True)
    # Each file once.
    reached = [os.path.realpath(tmp_path / path) for path in local_paths(tmp_path)]
    assert reached == [os.path.realpath(tmp_path / "data/train.json")]


def test_folders_that_link_to_each_other_end(tmp_path):
    fill(tmp_path, "a/x.json", "b/y.json")
    (tmp_path / "a/to_b").symlink_to(tmp_path / "b")
    (tmp_path / "b/to_a").symlink_to(tmp_path / "a")
    (tmp_path / "itself").symlink_to("itself")
    expected = ["a/to_b/y.json", "a/x.json", "b/to_a/x.json", "b/y.json", "itself"]
    assert local_paths(tmp_path) == expected


def test_folders_that_link_to_one_another_have_too_many_paths(tmp_path, monkeypatch):
    monkeypatch.setattr("snakechat.data.dataset_files.MAX_LINKED_FOLDERS", 100)
    names = "abcdef"
    fill(tmp_path, *(f"{name}/x.json" for name in names))
    for name in names:
        for other in names:
            (tmp_path / name / f"to_{other}").symlink_to(tmp_path / other)
    with pytest.raises(InputError, match="links lead to more than 100 folders"):
        local_paths(tmp_path)


def test_link_to_a_folder_outside_is_an_error_unless_links_are_followed(tmp_path):
    folder = fill(tmp_path / "mine", "data/x.json")
    fill(tmp_path / "other", "y.json")
    (folder / "inside").symlink_to("data")
    assert local_paths(folder, follow_links=False) == ["data/x.json", "inside/x.json"]
    (folder / "outside").symlink_to(tmp_path / "other")
    with pytest.raises(InputError, match=r"outside is a link to .*/other, outside of the folder"):
        local_paths(folder, follow_links=False)
    assert local_paths(folder)[-1] == "outside/y.json"


def test_a_dataset_cloned_from_the_hub(tmp_path):
    fill(
        tmp_path,
        ".git/config",
        ".git/lfs/objects/train.json",
        ".gitattributes",
        "README.md",
        "data/test-00000-of-00001-8c7c51afc6d45980.parquet",
        "data/train-00000-of-00002-2a1df75c6bce91ab.parquet",
        "data/train-00001-of-00002-7b94a2d3f1e0c586.parquet",
        "dataset_infos.json",
    )
    assert split_files(local_paths(tmp_path), {}) == {
        "train": [
            "data/train-00000-of-00002-2a1df75c6bce91ab.parquet",
            "data/train-00001-of-00002-7b94a2d3f1e0c586.parquet",
        ],
        "eval": ["data/test-00000-of-00001-8c7c51afc6d45980.parquet"],
    }


def convert(*splits):
    """Return paths of the branch refs/convert/parquet."""
    return [f"default/{split}/0000.parquet" for split in splits]


JAQUAD = (
    ["README.md", *convert("test", "train", "validation")],
    {"train": convert("train"), "eval": convert("validation")},
)
MIRACL = (
    convert("dev", "testA", "testB", "train"),
    {"train": convert("train"), "eval": convert("dev")},
)
HH = ["harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled"]
HC3 = ["baike", "finance", "law", "medicine", "nlpcc_dbqa", "open_qa", "psychology"]
ULTRAFEEDBACK = {
    f"{split}_{rows}": f"data/{split}_{rows}-00000-of-00001.parquet"
    for split in ("train", "test")
    for rows in ("prefs", "sft", "gen")
}
# Files of the repositories for which config.yaml has globs, and the splits that they select.
REPOSITORIES = {
    "SHP": (
        convert("test", "train", "validation"),
        {"train": convert("train"), "eval": convert("validation")},
    ),
    "miracl-zh": MIRACL,
    "miracl-ja": MIRACL,
    "HC3-Chinese": (
        ["HC3-Chinese.py", "README.md", *(f"{name}.jsonl" for name in ("all", *HC3))],
        {"train": ["all.jsonl"]},
    ),
    "qg_jaquad": JAQUAD,
    "qag_jaquad": JAQUAD,
    "hh-rlhf": (
        [
            ".gitattributes",
            "README.md",
            *(f"{name}/{split}.jsonl.gz" for name in HH for split in ("test", "train")),
            # Without pairs.
            "red-team-attempts/red_team_attempts.jsonl.gz",
        ],
        {
            "train": [f"{name}/train.jsonl.gz" for name in HH],
            "eval": [f"{name}/test.jsonl.gz" for name in HH],
        },
    ),
    "ultrafeedback": (
        ["README.md", *ULTRAFEEDBACK.values()],
        {"train": [ULTRAFEEDBACK["train_prefs"]], "eval": [ULTRAFEEDBACK["test_prefs"]]},
    ),
}


def test_every_dataset_with_globs_is_covered():
    assert {name for name, dataset in DATASETS.items() if "train" in dataset} == set(REPOSITORIES)


@pytest.mark.parametrize("name", REPOSITORIES)
def test_globs_of_the_config_select_the_right_files(name):
    paths, expected = REPOSITORIES[name]
    globs = {split: DATASETS[name][split] for split in ("train", "eval") if split in DATASETS[name]}
    assert splits_of(*paths, **globs) == expected
