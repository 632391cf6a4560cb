"""Mistakes of users and damaged data: one line each, before any training, and nothing lost."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

# What each config on top of config.yaml says wrongly, and the line that tells it.
CONFIGS = {
    "unknown key": (
        {"sft": {"recipes": {"tiny": {"learning_rat": 0.1}}}},
        "config: sft.recipes.tiny: Additional properties are not allowed ('learning_rat'",
    ),
    "number as text": (
        "sft: {recipes: {tiny: {learning_rate: 1e-5}}}",
        "config: sft.recipes.tiny.learning_rate: '1e-5' is not of type 'number'"
        " (YAML reads 1e-5 as text: write 1.0e-5)",
    ),
    "wrong type": (
        {"rlhf": {"defaults": {"epochs": 1.5}}},
        "config: rlhf.defaults.epochs: 1.5 is not of type 'integer'",
    ),
    "missing model": (
        {"sft": {"recipes": {"tiny": {"model": "tinny"}}}},
        "config: sft.recipes.tiny.model names 'tinny', which is not under models (there: ",
    ),
    "missing dataset": (
        {"reward": {"recipes": {"tiny": {"datasets": ["toy", "toys"]}}}},
        "config: reward.recipes.tiny.datasets names 'toys', which is not under datasets",
    ),
    "missing recipe": (
        {"rlhf": {"recipes": {"tiny": {"actor": "tinny"}}}},
        "config: sft.recipes has no 'tinny' (there: tiny, 125m,",
    ),
    "name that leaves output": (
        {"rlhf": {"recipes": {"../x": {"actor": "tiny"}}}},
        "config: rlhf.recipes: '../x' does not match",
    ),
    "glob that leaves its folder": (
        {"datasets": {"mine": {"path": "d", "format": "plain", "train": "../*.parquet"}}},
        "config: datasets.mine",
    ),
    "unknown format": (
        {"datasets": {"mine": {"path": "d", "format": "plane", "train": "*.parquet"}}},
        "config: datasets.mine",
    ),
}


@pytest.mark.parametrize("mistake", CONFIGS)
def test_config_mistake_is_told_in_one_line(sources, mistake):
    config, expected = CONFIGS[mistake]
    text = config if isinstance(config, str) else yaml.safe_dump(config)
    (sources.folder / "mine.yaml").write_text(text)
    process = sources.snakemake("-n", "output/rlhf/tiny", "--configfile", "mine.yaml")
    assert process.returncode == 1
    last = process.stdout.strip().splitlines()[-1]
    assert last.startswith(f"error: {expected}"), process.stdout
    assert "Traceback" not in process.stdout
    assert not (sources.folder / "output").exists()


@pytest.mark.parametrize("target", ["output/rlhf/nothing", "output/rlhf/../x"])
def test_target_that_is_no_recipe(sources, target):
    process = sources.snakemake("-n", target)
    assert process.returncode == 1
    assert "Traceback" not in process.stdout


def test_unknown_recipe_names_the_known_ones(sources):
    process = sources.snakemake("-n", "output/rlhf/nothing")
    assert (
        process.stdout.strip()
        .splitlines()[-1]
        .startswith("error: config: rlhf.recipes has no 'nothing' (there: tiny, 1.3b,")
    )


GOOD = [
    {"prompt": f"\n\nHuman: {n}?\n\nAssistant:", "chosen": f" {n}.", "rejected": " No."}
    for n in range(20)
]


def write_good(path):
    pq.write_table(pa.Table.from_pylist(GOOD), path)


def write_without_column(path):
    pq.write_table(pa.Table.from_pylist(GOOD).drop_columns(["rejected"]), path)


def write_null(path):
    rows = [dict(row) for row in GOOD]
    rows[7]["chosen"] = None
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_truncated(path):
    write_good(path)
    path.write_bytes(path.read_bytes()[:-20])


def write_empty(path):
    path.write_bytes(b"")


def write_no_rows(path):
    pq.write_table(pa.Table.from_pylist(GOOD).slice(0, 0), path)


DAMAGES = {
    "column missing": (
        write_without_column,
        "error: mine/train.parquet: no column rejected; it has prompt, chosen",
    ),
    "null cell": (
        write_null,
        "error: mine/train.parquet: row 7: chosen is nothing, expected text",
    ),
    "truncated": (write_truncated, "error: mine/train.parquet: not a whole parquet file ("),
    "empty file": (write_empty, "error: mine/train.parquet: not a whole parquet file (0 bytes)"),
    "no rows": (write_no_rows, "error: mine/train.parquet: no rows"),
}


@pytest.fixture
def mine(sources):
    """A workflow with a local dataset that has been imported and split."""
    folder = sources.folder / "mine"
    folder.mkdir()
    write_good(folder / "train.parquet")
    mine = {"path": "mine", "format": "plain", "train": "train.parquet"}
    (sources.folder / "mine.yaml").write_text(yaml.safe_dump({"datasets": {"mine": mine}}))
    sources.options = ("--configfile", "mine.yaml")
    sources.build("output/split/mine.manifest.json")
    return sources


def test_damaged_dataset_stops_the_import_and_loses_nothing(mine):
    records = mine.folder / "output/data/mine/train.parquet"
    before = records.read_bytes()
    for write, expected in DAMAGES.values():
        write(mine.folder / "mine/train.parquet")
        process = mine.snakemake("output/split/mine.manifest.json", "--cores", "1")
        assert process.returncode == 1
        lines = [line for line in process.stdout.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and lines[0].startswith(expected), process.stdout
        assert "Traceback" not in process.stdout
        assert records.read_bytes() == before
    # The good file again: what was imported from it is still there and is taken up.
    imported = records.stat().st_mtime_ns
    write_good(mine.folder / "mine/train.parquet")
    mine.build("output/split/mine.manifest.json")
    assert records.stat().st_mtime_ns == imported
    assert mine.planned("output/split/mine.manifest.json") == set()


def test_dataset_is_judged_by_content(mine):
    target = "output/split/mine.manifest.json"
    path = mine.folder / "mine/train.parquet"
    os.utime(path)
    assert mine.planned(target) == set()
    rows = [{**GOOD[0], "chosen": " Changed."}, *GOOD[1:]]
    pq.write_table(pa.Table.from_pylist(rows), path)
    # As cp -p or rsync -t would leave it: other content, an older time.
    os.utime(path, (1, 1))
    assert mine.planned(target) == {"import_dataset", "split_dataset"}
    write_good(path)
    assert mine.planned(target) == set()


def test_missing_dataset_names_its_folder(mine):
    (mine.folder / "mine/train.parquet").unlink()
    process = mine.snakemake("-n", "output/split/mine.manifest.json")
    assert process.returncode == 1
    assert process.stdout.strip().splitlines()[-1] == (
        "error: config: datasets.mine.train: no file in mine matches 'train.parquet'"
    )


def test_training_on_a_gpu_that_is_not_there(quick, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    placement = '{"nodes": 1, "gpus_per_node": 1, "micro_batch_tokens": 8192}'
    other = tmp_path / "spec.json"
    # Another name: this result does not exist yet, so that the program has something to do.
    spec = quick.spec_of("output/eval/sft/tiny")
    other.write_text(json.dumps({**spec, "path": "output/eval/sft/other"}))
    process = quick.run(
        "python", "scripts/evaluate_sft.py", "--spec", str(other), "--placement", placement
    )
    assert process.returncode == 1
    assert process.stdout.strip().splitlines()[-1] == (
        "error: placement asks for a GPU and torch finds none: set gpus_per_node: 0"
    )
