"""Which files of a dataset make its parts."""

import os
from pathlib import Path

import pytest
import yaml

from snakechat.data.dataset_files import kind_of, local_paths, matches, split_files
from snakechat.workflow.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
DATASETS = yaml.safe_load((ROOT / "config.yaml").read_text())["datasets"]


def parts(*paths, **globs):
    return split_files(sorted(paths), globs)


def refusal(*paths, **globs):
    with pytest.raises(InputError) as error:
        parts(*paths, **globs)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("train.parquet", "parquet"),
        ("data/train-00000-of-00001.parquet", "parquet"),
        ("data-00000-of-00001.arrow", "arrow"),
        ("train.jsonl", "jsonl"),
        ("train.jsonl.gz", "jsonl.gz"),
        ("train.json", "json"),
        ("train.csv", "csv"),
        # As wget leaves them.
        ("train.parquet?download=true", "parquet"),
        ("train.jsonl.gz?download=true", "jsonl.gz"),
        ("a.json/train.csv", "csv"),
        ("README.md", None),
        ("train.json.zip", None),
        ("train.parquet.lock", None),
        ("train.parquet.incomplete", None),
        ("train.csv?download=false", None),
        ("parquet", None),
        ("a.parquet/README", None),
        ("train.xjson", None),
    ],
)
def test_kinds_are_told_by_name(path, kind):
    assert kind_of(path) == kind


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("train.jsonl", "train"),
        ("training.jsonl", "train"),
        ("train2.jsonl", "train"),
        ("Train-set.jsonl", "train"),
        ("validation.jsonl", "eval"),
        ("valid.jsonl", "eval"),
        ("val_1.jsonl", "eval"),
        ("dev.jsonl", "eval"),
        ("my-eval.jsonl", "eval"),
        ("evaluation.jsonl", "eval"),
        ("test.jsonl", "eval"),
        ("testing.jsonl", "eval"),
        ("TEST.jsonl", "eval"),
        ("test/rows.jsonl", "eval"),
        ("en/test/0000.jsonl", "eval"),
        # The last word counts.
        ("test/train.jsonl", "train"),
        ("train/test.jsonl", "eval"),
        ("train_test.jsonl", "eval"),
        ("validation/train/0.jsonl", "train"),
    ],
)
def test_parts_are_told_by_the_last_word_of_a_path(name, part):
    found = parts("0/rows/train.jsonl", name)
    if part == "train":
        assert found == {"train": ["0/rows/train.jsonl", name]}
    else:
        assert found == {"train": ["0/rows/train.jsonl"], "eval": [name]}


@pytest.mark.parametrize("name", ["latest", "contest", "devil", "value", "trainer", "attestation"])
def test_a_word_inside_another_is_none(name):
    # As a file without a word it is for training, where no other is.
    assert parts(f"{name}.jsonl", "test.jsonl")["train"] == [f"{name}.jsonl"]
    assert parts(f"{name}.jsonl", "train.jsonl")["train"] == ["train.jsonl"]


def test_validation_comes_before_test():
    assert parts("train.csv", "test.csv", "validation.csv") == {
        "train": ["train.csv"],
        "eval": ["validation.csv"],
    }
    assert parts("train.csv", "test.csv") == {"train": ["train.csv"], "eval": ["test.csv"]}


def test_files_without_a_word_are_for_training():
    assert parts("en.jsonl", "de.jsonl", "test.jsonl") == {
        "train": ["de.jsonl", "en.jsonl"],
        "eval": ["test.jsonl"],
    }


def test_without_files_to_evaluate_on_there_is_no_such_part():
    assert parts("train.jsonl") == {"train": ["train.jsonl"]}
    assert parts("rows.jsonl", "README.md") == {"train": ["rows.jsonl"]}


def test_files_that_are_no_rows_are_passed_over():
    found = parts(
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


def test_a_name_with_cache_in_it_is_rows():
    assert parts("my-cache-1.json", "a/state.json.json")["train"] == [
        "a/state.json.json",
        "my-cache-1.json",
    ]


def test_files_of_several_kinds_are_refused():
    message = refusal("train.parquet", "train.jsonl", "README.md")
    assert "jsonl, parquet" in message
    # What the user is to do.
    assert "train:" in message
    # A kind of its own, too.
    assert "jsonl, jsonl.gz" in refusal("train.jsonl", "test.jsonl.gz")


def test_with_globs_several_kinds_may_lie_side_by_side():
    paths = ["a.csv", "train.jsonl", "train.parquet"]
    assert parts(*paths, train="*.jsonl", eval="*.csv") == {
        "train": ["train.jsonl"],
        "eval": ["a.csv"],
    }


@pytest.mark.parametrize("paths", [[], ["README.md"], [".git/train.json", "state.json"]])
def test_a_folder_without_rows_is_refused(paths):
    assert refusal(*paths).startswith("train: no parquet")


def test_files_to_evaluate_on_alone_are_not_called_missing():
    # There is a parquet file; what lacks is one to train on.
    message = refusal("data/validation.parquet")
    assert message.startswith("train: ")
    assert "is parquet, json or csv" not in message


# Shards.


def shards(numbers, of, name="data/train", end=".parquet"):
    return [f"{name}-{number:05}-of-{of:05}{end}" for number in numbers]


@pytest.mark.parametrize(
    ("numbers", "of"), [([0, 1, 2], 3), ([1, 2, 3], 3), ([0], 1), ([1], 1), (range(12), 12)]
)
def test_whole_sets_of_shards_are_taken(numbers, of):
    paths = shards(numbers, of)
    assert parts(*paths) == {"train": paths}
    # With a digest behind the number, as the hub names them.
    paths = [f"data/train-{n:05}-of-{of:05}-{n:016x}.parquet" for n in numbers]
    assert parts(*paths) == {"train": paths}


@pytest.mark.parametrize(
    ("numbers", "of", "missing"),
    [
        ([0, 2], 3, 1),
        ([0, 1], 3, 2),
        ([1, 3], 3, 2),
        ([0], 2, 1),
        ([0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11], 12, 4),
    ],
)
def test_a_missing_shard_is_refused_with_its_number(numbers, of, missing):
    message = refusal(*shards(numbers, of))
    assert message.startswith("data/train: ")
    assert f"{len(numbers)} of {of} shards" in message
    assert f"number {missing} is missing" in message


def test_missing_shards_at_the_start_are_refused():
    # Without number 0 it is not clear whether they are counted from 1.
    assert "2 of 3 shards" in refusal(*shards([1, 2], 3))
    assert "1 of 3 shards, number 1 is missing" in refusal(*shards([2], 3))
    assert "2 of 3 shards, number 1 is missing" in refusal(*shards([2, 3], 3))


def test_shards_are_looked_for_in_each_part_and_folder():
    whole = shards([0, 1], 2)
    assert refusal(*whole, *shards([1], 2, "data/test")).startswith("data/test: ")
    assert refusal(*whole, *shards([0], 2, "more/train")).startswith("more/train: ")
    # Two sets in the same part that differ in their number.
    found = parts(*whole, *shards([0, 1, 2], 3, "more/train"))
    assert len(found["train"]) == 5


def test_shards_that_no_part_uses_do_not_matter():
    # validation is there, so test is not used.
    paths = ["train.parquet", "validation.parquet", *shards([0], 2, "test")]
    assert parts(*paths)["eval"] == ["validation.parquet"]


def test_a_missing_shard_behind_a_glob_is_refused():
    message = refusal(*shards([0, 1], 3, end=".jsonl"), train="data/*.jsonl")
    assert "number 2 is missing" in message


# Globs.


@pytest.mark.parametrize(
    ("glob", "path"),
    [
        ("train.parquet", "train.parquet"),
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
        ("*/train.jsonl.gz", "train.jsonl.gz"),
        ("a/**/c.parquet", "ab/c.parquet"),
        ("a/**/c.parquet", "a/bc.parquet"),
        ("train-?.csv", "train-.csv"),
        ("train-?.csv", "train-12.csv"),
        ("a?b.csv", "a/b.csv"),
    ],
)
def test_globs_that_do_not_match(glob, path):
    assert not matches(path, glob)


def test_globs_choose_files_whatever_words_they_have():
    paths = ["test/a.jsonl", "train/a.jsonl", "train/b.jsonl"]
    assert parts(*paths, train="**/a.jsonl") == {"train": ["test/a.jsonl", "train/a.jsonl"]}
    assert parts(*paths, train="test/*", eval="train/b.jsonl") == {
        "train": ["test/a.jsonl"],
        "eval": ["train/b.jsonl"],
    }


def test_with_a_glob_for_train_alone_nothing_is_there_to_evaluate_on():
    assert parts("train.csv", "test.csv", train="train.*") == {"train": ["train.csv"]}


@pytest.mark.parametrize(
    ("globs", "part", "glob"),
    [
        ({"train": "*.parquet"}, "train", "*.parquet"),
        ({"train": "train.csv", "eval": "dev/*.csv"}, "eval", "dev/*.csv"),
    ],
)
def test_a_glob_that_matches_nothing_is_named(globs, part, glob):
    message = refusal("train.csv", "test.csv", **globs)
    assert message.startswith(f"{part}: ")
    assert glob in message


def test_a_file_in_both_parts_is_refused():
    # Rows that are trained on would be evaluated on.
    assert "test.parquet" in refusal(
        "test.parquet", "train.parquet", train="*.parquet", eval="test.parquet"
    )


# Layouts of folders and repositories.


def fill(folder, *paths):
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("{}\n")
    return folder


def test_local_paths_are_relative_and_sorted(tmp_path):
    fill(tmp_path, "b/c/x.json", "a.json", "b/y.json", "README.md")
    assert local_paths(tmp_path) == ["README.md", "a.json", "b/c/x.json", "b/y.json"]
    assert local_paths(str(tmp_path)) == local_paths(tmp_path)


def test_local_paths_of_an_empty_folder(tmp_path):
    assert local_paths(tmp_path) == []


def test_local_paths_lead_behind_links(tmp_path):
    # A folder on another disk, and a hub's cache, whose files are links to blobs.
    store = fill(tmp_path / "store", "rows/train.json", "blob")
    folder = fill(tmp_path / "mine", "README.md")
    (folder / "data").symlink_to(store / "rows")
    (folder / "test.json").symlink_to(store / "blob")
    assert local_paths(folder) == ["README.md", "data/train.json", "test.json"]
    (tmp_path / "link").symlink_to(folder)
    assert local_paths(tmp_path / "link") == local_paths(folder)


def test_a_link_that_leads_back_does_not_repeat_the_files(tmp_path):
    fill(tmp_path, "data/train.json")
    (tmp_path / "data/here").symlink_to(tmp_path, target_is_directory=True)
    # Each file once, however it is reached.
    reached = [os.path.realpath(tmp_path / path) for path in local_paths(tmp_path)]
    assert reached == [os.path.realpath(tmp_path / "data/train.json")]


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


def test_a_dataset_that_was_saved_to_disk(tmp_path):
    shards = [f"data-{number:05}-of-00002.arrow" for number in (0, 1)]
    fill(tmp_path, "cache-0123456789abcdef.arrow", "dataset_info.json", "state.json", *shards)
    assert split_files(local_paths(tmp_path), {}) == {"train": shards}


def test_a_dict_of_datasets_that_was_saved_to_disk(tmp_path):
    about = ["dataset_info.json", "state.json", "cache-0123456789abcdef.arrow"]
    for part in ("train", "test"):
        fill(tmp_path / part, "data-00000-of-00001.arrow", *about)
    fill(tmp_path, "dataset_dict.json")
    assert split_files(local_paths(tmp_path), {}) == {
        "train": ["train/data-00000-of-00001.arrow"],
        "eval": ["test/data-00000-of-00001.arrow"],
    }


def test_shp_as_it_stands_on_main():
    # A folder for each of its domains.
    domains = ["askculinary", "askscience", "legaladvice"]
    paths = [f"{domain}/{part}.json" for domain in domains for part in ("test", "train")]
    paths += [f"{domain}/validation.json" for domain in domains]
    assert parts("README.md", ".gitattributes", *paths) == {
        "train": [f"{domain}/train.json" for domain in domains],
        "eval": [f"{domain}/validation.json" for domain in domains],
    }


def convert(*parts):
    """Paths of a branch refs/convert/parquet."""
    return [f"default/{part}/0000.parquet" for part in parts]


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
# Files of the repositories that config.yaml has globs for, and the parts that the globs choose.
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
            *(f"{name}/{part}.jsonl.gz" for name in HH for part in ("test", "train")),
            # No pairs.
            "red-team-attempts/red_team_attempts.jsonl.gz",
        ],
        {
            "train": [f"{name}/train.jsonl.gz" for name in HH],
            "eval": [f"{name}/test.jsonl.gz" for name in HH],
        },
    ),
}


def test_every_dataset_with_globs_is_looked_at():
    assert {name for name, dataset in DATASETS.items() if "train" in dataset} == set(REPOSITORIES)


@pytest.mark.parametrize("name", REPOSITORIES)
def test_globs_of_the_config_choose_the_right_files(name):
    paths, expected = REPOSITORIES[name]
    globs = {part: DATASETS[name][part] for part in ("train", "eval") if part in DATASETS[name]}
    assert parts(*paths, **globs) == expected
