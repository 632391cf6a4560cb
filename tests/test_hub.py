"""Models and datasets of the hub, from a small hub on this machine, whole and broken."""

import io
import os
import re
import socket
import subprocess
import sys
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import INIT, ROOT, Workflow, copy_sources
from hub import Hub
from rlhf.job import InputError
from rlhf.models import copy_causal, make_causal, save_model
from rlhf.records import read_records


def torch_bytes(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def preferences(name, number):
    return [
        {
            "prompt": f"\n\nHuman: {name} {n}?\n\nAssistant:",
            "chosen": f" {n}.",
            "rejected": " No.",
        }
        for n in range(number)
    ]


def parquet_bytes(rows):
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


TRAIN = [preferences("first", 25), preferences("second", 15)]
EVAL = preferences("eval", 7)

MODELS = {
    # Name in the config: repository, revision.
    "safe": ("lab/safe", "main"),
    "torch": ("lab/torch", "main"),
    "harmful": ("lab/harmful", "main"),
    "damaged": ("lab/damaged", "main"),
    "unknown": ("lab/unknown", "main"),
    "cut": ("lab/cut", "main"),
}
GLOBS = {"train": "data/train-*.parquet", "eval": "data/test-*.parquet"}
DATASETS = {
    # Name in the config: repository, revision, globs.
    "both": ("lab/pairs", "main", GLOBS),
    "tenth": ("lab/pairs", "main", {"train": GLOBS["train"]}),
    "deep": ("lab/pairs", "main", {"train": "**/*.parquet"}),
    "nothing": ("lab/pairs", "main", {**GLOBS, "eval": "data/dev-*.parquet"}),
    "revision": ("lab/pairs", "v2", GLOBS),
    "error": ("lab/error", "main", GLOBS),
}


def config_of(models, datasets):
    return {
        "models": {name: {"hub": hub, "revision": at} for name, (hub, at) in models.items()},
        "datasets": {
            name: {"hub": hub, "revision": at, "format": "plain", **globs}
            for name, (hub, at, globs) in datasets.items()
        },
    }


class Payload:
    """An object whose unpickling makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture(scope="module")
def model(tokenizer):
    """A tiny model and its tokenizer."""
    return make_causal(INIT, tokenizer, 1), tokenizer


@pytest.fixture(scope="module")
def hub(model, tmp_path_factory):
    """A hub that serves the repositories of MODELS and DATASETS which exist."""
    folder = tmp_path_factory.mktemp("served")
    save_model(*model, folder)
    safe = {path.name: path.read_bytes() for path in folder.iterdir()}
    bare = {name: data for name, data in safe.items() if name != "model.safetensors"}
    weights = model[0].state_dict()
    # Named as in the files of OPT on the hub: of the model without its head, which is tied.
    headless = {
        name.removeprefix("model."): tensor
        for name, tensor in weights.items()
        if name != "lm_head.weight"
    }
    harmful = {**weights, "payload": Payload(folder / "ran")}
    pairs = {
        "README.md": b"# Pairs\n",
        "data/train-00000-of-00002.parquet": parquet_bytes(TRAIN[0]),
        "data/train-00001-of-00002.parquet": parquet_bytes(TRAIN[1]),
        "data/test-00000-of-00001.parquet": parquet_bytes(EVAL),
        "top.parquet": parquet_bytes(preferences("top", 3)),
    }
    hub = Hub()
    hub.marker = folder / "ran"
    hub.repositories = {
        # What is not needed must not be fetched: these weights are no weights.
        "model/lab/safe": {**safe, "pytorch_model.bin": b"", "tf_model.h5": b""},
        "model/lab/torch": {**bare, "pytorch_model.bin": torch_bytes(headless), "tf_model.h5": b""},
        "model/lab/harmful": {**bare, "pytorch_model.bin": torch_bytes(harmful)},
        "model/lab/damaged": {**safe, "model.safetensors": safe["model.safetensors"][:-9]},
        "model/lab/cut": safe,
        "dataset/lab/pairs": pairs,
        "dataset/lab/error": pairs,
    }
    hub.faults = {"model/lab/cut": "cut", "dataset/lab/error": "file"}
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    yield hub
    hub.shutdown()
    hub.server_close()


@pytest.fixture(scope="module")
def built(hub, tmp_path_factory):
    """A workflow in which everything was asked of the hub at once, and Snakemake's process."""
    folder = tmp_path_factory.mktemp("hub")
    copy_sources(folder)
    (folder / "mine.yaml").write_text(yaml.safe_dump(config_of(MODELS, DATASETS)))
    workflow = Workflow(folder, "--configfile", "mine.yaml")
    workflow.environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "home")}
    workflow.environment |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    targets = [f"output/models/{name}.manifest.json" for name in MODELS]
    targets += [f"output/data/{name}.manifest.json" for name in DATASETS]
    return workflow, workflow.snakemake(*targets, "--keep-going", "--cores", "2")


def told(workflow, rule, name):
    """The one line with which a job failed, after "error: "."""
    log = (workflow.folder / f"output/logs/{rule}/{name}.log").read_text()
    assert "Traceback" not in log
    (line,) = [line for line in log.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


def names(folder):
    return {path.name for path in folder.iterdir()}


# What arrives whole.


@pytest.mark.parametrize("name", ["safe", "torch"])
def test_model_arrives_as_safetensors(built, hub, model, name):
    workflow, process = built
    folder = workflow.folder / "output/models" / name
    assert folder.exists(), process.stdout
    assert "model.safetensors" in names(folder)
    assert not [file for file in names(folder) if file.endswith((".bin", ".h5", ".pt"))]
    source = (folder / "source.txt").read_text()
    assert source == f"lab/{name} {hub.commit(f'model/lab/{name}')}\n"
    served, tokenizer = model
    arrived = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert arrived.keys() == served.state_dict().keys()
    assert all(torch.equal(arrived[key], tensor) for key, tensor in served.state_dict().items())
    text = "\n\nHuman: Name 2 fruits.\n\nAssistant:"
    assert AutoTokenizer.from_pretrained(folder)(text) == tokenizer(text)


def test_nothing_is_fetched_that_is_not_needed(built, hub):
    fetched = {path.rsplit("/", 1)[-1] for path in hub.requests if "/resolve/" in path}
    assert {"config.json", "model.safetensors", "pytorch_model.bin"} <= fetched
    assert not fetched & {"tf_model.h5", "README.md"}
    assert not [path for path in hub.requests if re.fullmatch("/lab/safe/.*[.]bin", path)]


def test_dataset_arrives(built, hub):
    workflow, process = built
    folder = workflow.folder / "output/data/both"
    assert folder.exists(), process.stdout
    assert read_records(folder / "train.parquet") == TRAIN[0] + TRAIN[1]
    assert read_records(folder / "eval.parquet") == EVAL
    commit = hub.commit("dataset/lab/pairs")
    assert (folder / "source.txt").read_text() == f"lab/pairs {commit}\n"


def test_dataset_without_eval_loses_a_tenth(built):
    folder = built[0].folder / "output/data/tenth"
    train, held_out = (read_records(folder / f"{part}.parquet") for part in ("train", "eval"))
    assert (len(train), len(held_out)) == (36, 4)
    assert sorted(train + held_out, key=str) == sorted(TRAIN[0] + TRAIN[1], key=str)


def test_glob_means_the_same_as_in_a_local_folder(built):
    folder = built[0].folder / "output/data/deep"
    prompts = {row["prompt"].split()[1] for row in read_records(folder / "train.parquet")}
    assert prompts == {"first", "second", "eval", "top"}


# What does not.

FAILURES = {
    ("fetch_model", "harmful"): "hub model lab/harmful at COMMIT: weights that are more than",
    ("fetch_model", "damaged"): "hub model lab/damaged at COMMIT: .",
    ("fetch_model", "unknown"): "hub model lab/unknown at main: 404 .*Repository Not Found",
    ("fetch_model", "cut"): "hub model lab/cut at main: peer closed connection",
    ("import_dataset", "nothing"): "lab/pairs: no eval file matches 'data/dev-[*].parquet'",
    ("import_dataset", "revision"): "hub dataset lab/pairs at v2: 404 .*Revision Not Found",
    ("import_dataset", "error"): "hub dataset lab/error at main: .*500 Internal Server Error",
}
FOLDERS = {"fetch_model": "output/models", "import_dataset": "output/data"}


@pytest.mark.parametrize(("rule", "name"), FAILURES)
def test_failure_is_told_in_one_line_and_leaves_no_result(built, rule, name):
    workflow, process = built
    assert process.returncode == 1
    line = re.sub(r"\b[0-9a-f]{40}\b", "COMMIT", told(workflow, rule, name))
    assert re.match(FAILURES[rule, name], line), line
    left = [path for path in names(workflow.folder / FOLDERS[rule]) if path.startswith(name)]
    assert left == []


def test_weights_that_hide_an_object_run_nothing(built, hub):
    assert "lab/harmful" in told(built[0], "fetch_model", "harmful")
    assert not hub.marker.exists()
    # What loading was to run would have made it.
    make, arguments = Payload(hub.marker).__reduce__()
    make(*arguments)
    assert hub.marker.exists()
    hub.marker.rmdir()


def test_weights_that_are_missing_are_not_made_up(model, tmp_path):
    save_model(*model, tmp_path)
    weights = {key: t for key, t in model[0].state_dict().items() if "layers.1.fc2" not in key}
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"weights are missing: model.decoder.layers.1.fc2.bias, "):
        copy_causal(tmp_path, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_next_run_succeeds_after_a_failure(built, hub, monkeypatch):
    monkeypatch.setattr(hub, "faults", {})
    workflow = built[0]
    process = workflow.snakemake(
        "output/models/cut.manifest.json", "output/data/error.manifest.json", "--cores", "2"
    )
    assert process.returncode == 0, process.stdout
    assert "model.safetensors" in names(workflow.folder / "output/models/cut")
    for folder, name in (("output/models", "cut"), ("output/data", "error")):
        assert f".{name}.tmp" not in names(workflow.folder / folder)


def test_offline_takes_what_is_in_the_cache(built, hub):
    folder = built[0].folder
    models = {"again": ("lab/torch", "main")}
    datasets = {"again": ("lab/pairs", "main", GLOBS), "never": ("lab/never", "main", GLOBS)}
    (folder / "offline.yaml").write_text(yaml.safe_dump(config_of(models, datasets)))
    workflow = Workflow(folder, "--configfile", "offline.yaml")
    workflow.environment = {**built[0].environment, "HF_HUB_OFFLINE": "1"}
    asked = len(hub.requests)
    process = workflow.snakemake(
        "output/models/again.manifest.json",
        "output/data/again.manifest.json",
        "output/data/never.manifest.json",
        *("--keep-going", "--cores", "2"),
    )
    assert process.returncode == 1
    assert len(hub.requests) == asked
    for result, name in (("models/again", "models/torch"), ("data/again", "data/both")):
        files = names(folder / "output" / name) - {"manifest.json"}
        assert files == names(folder / "output" / result) - {"manifest.json"}, process.stdout
        for file in files:
            online = (folder / "output" / name / file).read_bytes()
            assert (folder / "output" / result / file).read_bytes() == online
    line = told(workflow, "import_dataset", "never")
    assert line.startswith("hub dataset lab/never at main: Cannot find an appropriate cached")
    assert "HF_HUB_OFFLINE" in line


# huggingface_hub tries a hub that is ill again, for half a minute in all.
IMPATIENT = """
import time
time.sleep = lambda seconds: None
"""
FETCH = """
import sys
from rlhf.hub import fetch
from rlhf.job import InputError
for repository in sys.argv[1:]:
    try:
        print(repository, fetch(repository, "dataset", "main", ["*.parquet"]))
    except InputError as error:
        print(f"error: {error}")
"""


def fetch_each(repositories, endpoint, home, before=""):
    """What rlhf.hub.fetch says of each repository."""
    process = subprocess.run(
        [sys.executable, "-c", before + FETCH, *repositories],
        env={
            **os.environ,
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "PYTHONPATH": str(ROOT / "scripts"),
        },
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def test_hub_that_is_ill(hub, tmp_path):
    cases = {
        "lab/revision": "500 Internal Server Error",
        "lab/tree": "500 Internal Server Error",
        "lab/head": "An error happened while trying to locate the file on the Hub",
        "lab/html": "Expecting value: line 1 column 1",
        "lab/no--name": "Cannot have -- or .. in repo_id",
    }
    for name in ("revision", "tree", "head", "html"):
        hub.repositories[f"dataset/lab/{name}"] = hub.repositories["dataset/lab/pairs"]
        hub.faults[f"dataset/lab/{name}"] = name
    lines = fetch_each(cases, hub.endpoint, tmp_path, before=IMPATIENT)
    assert len(lines) == len(cases), lines
    for line, (repository, reason) in zip(lines, cases.items(), strict=True):
        assert line.startswith(f"error: hub dataset {repository} at main: "), line
        assert reason in line


def test_hub_that_is_not_there(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
    (line,) = fetch_each(["lab/pairs"], endpoint, tmp_path)
    assert re.match("error: hub dataset lab/pairs at main: Got: ConnectError: .*refused", line)
