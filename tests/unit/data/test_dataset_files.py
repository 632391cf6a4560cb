"""Which files of a dataset belong to its splits."""

import json

import pytest

from snakechat.data import dataset_files
from snakechat.data.dataset_files import local_paths, resolve_splits, split_files, splits_in_child
from snakechat.workflow.errors import InputError

NO_ROWS = [
    ".cache/huggingface/download/train.json",
    "README.md",
    "cache-1f0a2b3c4d5e6f70_00000_of_00002.arrow",
    "data/dataset_info.json",
    "data/state.json",
    "dataset_infos.json",
]
THREE = ["test/a.jsonl", "train/a.jsonl", "train/b.jsonl"]
PREFERENCES = ["d/test_prefs-0.parquet", "d/train_prefs-0.parquet", "d/train_sft-0.parquet"]
NAMES = ("train_sft", "train_prefs", "test_prefs")
FILES = [{"split": split, "path": f"d/{split}-*"} for split in NAMES]
CARD = [{"config_name": "default", "data_files": FILES}]
A = {"config_name": "a"}
CONFIGS = [{"config_name": "main", "data_files": "d/train_sft*"}]
CONFIGS += [{"config_name": "socratic", "data_dir": "s"}]


@pytest.fixture(autouse=True, scope="module")
def in_this_process():
    """Resolve splits without another process, whose imports take a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_files, "splits_in_child", lambda x: resolve_splits(*json.loads(x)))
        yield


def split(paths, configs=None, **source):
    """Return the files of train and of eval, as the datasets library resolves them; a remark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_files, "warn", (remarks := [None]).append)
        files = split_files(paths, source, configs, "mine")
    return files["train"], files.get("eval"), remarks[-1]


@pytest.mark.parametrize(
    ("paths", "train", "held_out"),
    [
        # Validation comes before test.
        (["test.csv", "train.csv", "validation.csv"], ["train.csv"], ["validation.csv"]),
        (["a.csv", "b.csv.gz"], ["a.csv", "b.csv.gz"], None),
        (["[1] {own} 数据/train.jsonl?download=true"], None, None),
        (sorted([*NO_ROWS, "data/train.parquet"]), ["data/train.parquet"], None),
        (["data/train-0-of-2.parquet", "data/train-1-of-2.parquet"], None, None),
    ],
)
def test_files_belong_to_the_splits_of_the_datasets_library(paths, train, held_out):
    assert split(paths) == (paths if train is None else train, held_out, None)


def test_globs_have_precedence_over_names():
    assert split(THREE, train="**/a.jsonl") == (THREE[:2], None, None)
    assert split(THREE, train="test/*", eval="train/b.jsonl") == (THREE[:1], THREE[2:], None)


def test_a_card_and_the_config_name_splits():
    names = {"train": "train_prefs", "eval": "test_prefs"}
    assert split(PREFERENCES, CARD, split=names) == (PREFERENCES[1:2], PREFERENCES[:1], None)
    assert split(PREFERENCES, CARD, split={"train": "train_sft"}) == (PREFERENCES[2:], None, None)
    paths = [*PREFERENCES, "s/test.jsonl", "s/train.jsonl"]
    assert split(paths, CONFIGS, name="main")[0] == PREFERENCES[2:]
    assert split(paths, CONFIGS, name="socratic")[:2] == (paths[4:], paths[3:4])
    # Without a card, or with one that only names configs, a folder has the name of a config.
    for configs in (None, ["s"]):
        assert split(paths, configs, name="s")[:2] == (paths[4:], paths[3:4])


def test_files_that_are_not_read_are_named():
    remark = split(["LICENSE", "README.md", "extra.jsonl", "train.jsonl", "train.jsonl.old"])[2]
    assert remark.startswith("mine: not read: extra.jsonl and 1 more, of another kind or without")
    assert split(["a.jsonl", "b.xlsx"])[2].startswith("mine: not read: b.xlsx, of another kind")
    assert split(["a.jsonl", "cache-b.jsonl"])[0] == ["a.jsonl", "cache-b.jsonl"]


@pytest.mark.parametrize(
    ("paths", "configs", "source", "error"),
    [
        (["a.jsonl", "b.parquet"], None, {}, "files of several kinds (jsonl, parquet): select"),
        (["a.csv", "a.csv.gz"], None, {}, "a.csv and a.csv.gz have the same name: remove one"),
        ([".git/train.json", "state.json"], None, {}, "no training files: expected parquet, arrow"),
        (["0/train.jsonl", "test/x.jsonl"], None, {}, "no files of the split train, found test"),
        (["train_test.csv"], None, {}, "train_test.csv is both in the train and in the eval split"),
        (["train.txt"], None, {"train": "*.txt"}, "train.txt: unknown kind of file, expected"),
        (PREFERENCES, CARD, {"split": {"train": "sft"}}, "no files of the split sft, found"),
        (PREFERENCES, CONFIGS, {}, "the card has several configs: set name to one of main, socrat"),
        (THREE, None, {"name": "x"}, "name: expected a config of the card or a folder, found x"),
        (THREE, [{**A, "data_files": "/etc/*"}], {}, "the card names '/etc/*': expected files"),
        (THREE, [{**A, "data_dir": "../b"}], {}, "the card names '../b': expected files of the"),
        (THREE, "x", {}, "the card has invalid configs: Expected configs to be a list"),
    ],
)
def test_what_cannot_be_resolved_is_an_error(paths, configs, source, error):
    with pytest.raises(InputError) as found:
        split(paths, configs, **source)
    assert str(found.value).startswith(error)


def test_planning_asks_another_process():
    files = splits_in_child(json.dumps([THREE, None, None]))
    assert files == resolve_splits(THREE, None, None) == {"test": THREE[:1], "train": THREE[1:]}
    with pytest.raises(InputError, match="expected a config of the card or a folder, found x"):
        splits_in_child(json.dumps([THREE, None, "x"]))


def test_a_link_to_a_folder_is_an_error(tmp_path):
    folder = tmp_path / "mine"
    for name in ("data", ".venv"):
        (folder / name).mkdir(parents=True)
    (folder / "data/x.json").touch()
    for link, target in (("link", folder), ("mine/.hidden", tmp_path), ("mine/.venv/a", tmp_path)):
        (tmp_path / link).symlink_to(target)
    (folder / "self").symlink_to("self")
    for name in ("mine", "link"):
        assert local_paths(tmp_path / name) == ["data/x.json", "self"]
    (folder / "data/all").symlink_to(folder / "data")
    with pytest.raises(InputError, match=r"^data/all is a link to a folder: name what it leads to"):
        local_paths(folder)
