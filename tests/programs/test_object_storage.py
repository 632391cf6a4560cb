"""Datasets and models of an object store: a local S3 server."""

import json
import time

import pytest
import torch
import yaml
from safetensors.torch import load_file

from conftest import INIT, Workflow, copy_sources
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from support.files import as_jsonl
from support.object_store import KEYS, serving_objects
from support.source_files import numbered

pytestmark = pytest.mark.slow

DATASET, SPLIT, MODEL = (
    f"output/{folder}/remote.manifest.json" for folder in ("data", "split", "models")
)
CONFIG = {
    "datasets": {
        "local": {"path": "pairs", "format": "plain"},
        "remote": {"path": "s3://data/pairs", "format": "plain"},
    },
    "models": {"remote": {"path": "s3://models/tiny"}},
}


def rows(number):
    return as_jsonl([{**row, "rejected": " No."} for row in numbered(number)])


@pytest.fixture(scope="module")
def store():
    with serving_objects() as store:
        yield store


@pytest.fixture(scope="module")
def made(store, tmp_path_factory, tokenizer):
    """A workflow that has imported a dataset and fetched a model from a folder and the store."""
    folder = tmp_path_factory.mktemp("storage") / "work"
    copy_sources(folder)
    (folder / "mine.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "pairs").mkdir()
    (folder / "pairs/README.md").write_text("---\nlicense: mit\n---\n# Pairs\n")
    for name, number in (("train-1", 20), ("train-2", 10), ("test", 5)):
        (folder / f"pairs/{name}.jsonl").write_bytes(rows(number))
    (folder / "model").mkdir()
    save_model(make_causal(INIT, tokenizer, 1), tokenizer, folder / "model")
    for bucket in ("data", "models"):
        store.put(bucket)
    store.put_folder("data/pairs", folder / "pairs")
    # As a console makes a folder.
    store.put("data/pairs/")
    store.put_folder("models/tiny", folder / "model")
    workflow = Workflow(folder, "--configfile", "mine.yaml")
    workflow.environment |= store.environment
    workflow.build(SPLIT, MODEL, "output/data/local.manifest.json")
    return workflow


@pytest.fixture
def offline(made):
    """The workflow while the store cannot be reached."""
    offline = Workflow(made.folder, *made.options)
    offline.environment = {**made.environment, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}
    return offline


def manifest_of(workflow, result):
    return json.loads((workflow.folder / f"output/{result}.manifest.json").read_text())


def test_a_dataset_in_a_bucket_becomes_what_its_local_copy_becomes(made):
    local, remote = (manifest_of(made, f"data/{name}") for name in ("local", "remote"))
    assert remote["files"] == local["files"]
    assert remote["facts"] == local["facts"]
    assert remote["facts"]["licence"] == "mit"
    assert remote["spec"]["files"].keys() == local["spec"]["files"].keys()


def test_a_model_in_a_bucket_is_fetched(made):
    given, found = (
        load_file(made.folder / folder / "model.safetensors")
        for folder in ("model", "output/models/remote")
    )
    assert given.keys() == found.keys()
    assert all(torch.equal(given[key], found[key]) for key in given)


def test_credentials_are_in_no_file(made):
    for path in made.folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        assert not any(value.encode() in content for value in KEYS.values()), path


def test_a_changed_object_makes_stale_what_was_made_from_it(made, store):
    content = rows(20)
    assert made.planned(SPLIT, MODEL) == set()
    store.put("data/pairs/train-1.jsonl", content)
    store.put("data/pairs/notes.txt", b"Not read.")
    store.put("data/pairs/README.md", b"Another card.")
    assert made.planned(SPLIT, MODEL) == set()
    try:
        store.put("data/pairs/train-1.jsonl", content.replace(b"Response 1.", b"Response 0."))
        assert made.planned(SPLIT, MODEL) == {"import_dataset", "split_dataset"}
        store.put("data/pairs/train-3.jsonl", content)
        process = made.snakemake("-n", DATASET)
        assert "train/train-1.jsonl changed" in process.stdout
        assert "train/train-3.jsonl was added" in process.stdout
    finally:
        store.put("data/pairs/train-1.jsonl", content)


def test_a_store_that_cannot_be_reached_is_one_line_soon(offline):
    started = time.monotonic()
    process = offline.snakemake("-n", DATASET)
    assert time.monotonic() - started < 20
    assert process.returncode == 1
    assert "error: s3://data/pairs: Could not connect" in process.stdout
    assert "set path to a local copy" in process.stdout


def test_jobs_of_a_cluster_plan_with_the_listing_of_their_build(offline):
    (build,) = (offline.folder / "output/code").glob("*.json")
    offline.environment["SNAKECHAT_BUILD"] = str(build)
    process = offline.snakemake("-n", "--mode", "remote", SPLIT)
    assert process.returncode == 0, process.stdout
    assert "Nothing to be done" in process.stdout
