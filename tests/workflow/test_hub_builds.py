"""Builds of models and datasets of a hub: a local server that implements its protocol."""

import io
import json
import os

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import INIT, Workflow, copy_sources
from snakechat.data.records import read_texts
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from support.files import as_parquet
from support.hub import serving


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


TRAIN = [preferences("first", 25), preferences("second", 15)]
EVAL = preferences("eval", 7)
PAIRS = {
    "README.md": b"---\nlicense: mit\n---\n# Pairs\n",
    "data/train-00000-of-00002.parquet": as_parquet(TRAIN[0]),
    "data/train-00001-of-00002.parquet": as_parquet(TRAIN[1]),
    "data/test-00000-of-00001.parquet": as_parquet(EVAL),
    "top.parquet": as_parquet(preferences("top", 3)),
}


class Payload:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture(scope="module")
def model(tokenizer):
    """A tiny model and its tokenizer."""
    return make_causal(INIT, tokenizer, 1), tokenizer


@pytest.fixture(scope="module")
def models(model, tmp_path_factory):
    """Return {repository: {file: bytes}} of the models, and the folder that Payload creates."""
    folder = tmp_path_factory.mktemp("served")
    save_model(*model, folder)
    safe = {path.name: path.read_bytes() for path in folder.iterdir()}
    bare = {name: data for name, data in safe.items() if name != "model.safetensors"}
    weights = model[0].state_dict()
    # The names in OPT's files on the hub: those of the model without its tied head.
    headless = {
        name.removeprefix("model."): tensor
        for name, tensor in weights.items()
        if name != "lm_head.weight"
    }
    harmful = {**weights, "payload": Payload(folder / "ran")}
    # Must not be downloaded: these files contain no weights.
    useless = {"tf_model.h5": b"", "onnx/config.json": b"", "onnx/model.safetensors": b""}
    repositories = {
        "model/lab/torch": {**bare, **useless, "pytorch_model.bin": torch_bytes(headless)},
        "model/lab/harmful": {**bare, "pytorch_model.bin": torch_bytes(harmful)},
    }
    return repositories, folder / "ran"


CONFIG = {
    "models": {
        "torch": {"hub": "lab/torch"},
        "harmful": {"hub": "lab/harmful", "revision": "main"},
    },
    "datasets": {
        "both": {
            "hub": "lab/pairs",
            "format": "plain",
            "train": "data/train-*.parquet",
            "eval": "data/test-*.parquet",
        },
    },
}
TARGETS = [
    f"output/{result}.manifest.json" for result in ("models/torch", "models/harmful", "data/both")
]


@pytest.fixture(scope="module")
def served(models):
    """A hub that serves the repositories of CONFIG."""
    with serving() as hub:
        hub.repositories, hub.marker = models
        hub.repositories["dataset/lab/pairs"] = PAIRS
        yield hub


@pytest.fixture(scope="module")
def built(served, tmp_path_factory):
    """A workflow that has built all models and datasets at once, and Snakemake's process."""
    folder = tmp_path_factory.mktemp("hub")
    copy_sources(folder)
    (folder / "mine.yaml").write_text(yaml.safe_dump(CONFIG))
    workflow = Workflow(folder, "--configfile", "mine.yaml")
    workflow.environment = {"HF_ENDPOINT": served.endpoint, "HF_HOME": str(folder / "home")}
    workflow.environment |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1,localhost"}
    return workflow, workflow.snakemake(*TARGETS, "--keep-going", "--cores", "2")


def names(folder):
    return {path.name for path in folder.iterdir()}


def rows(path):
    """Return the texts of records by their columns."""
    names = ("prompt", "chosen", "rejected")
    return [dict(zip(names, texts, strict=True)) for texts in read_texts(path)]


def test_model_is_stored_as_safetensors(built, served, model):
    workflow, process = built
    folder = workflow.folder / "output/models/torch"
    assert folder.exists(), process.stdout
    assert "model.safetensors" in names(folder)
    assert not [file for file in names(folder) if file.endswith((".bin", ".h5", ".pt"))]
    manifest = json.loads((workflow.folder / "output/models/torch.manifest.json").read_text())
    assert manifest["facts"]["commit"] == served.commit("model/lab/torch")
    # The repository has no card.
    assert manifest["facts"]["licence"] is None
    weights, tokenizer = model
    arrived = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert arrived.keys() == weights.state_dict().keys()
    assert all(torch.equal(arrived[key], tensor) for key, tensor in weights.state_dict().items())
    text = "\n\nHuman: Name 2 fruits.\n\nAssistant:"
    assert AutoTokenizer.from_pretrained(folder)(text) == tokenizer(text)


def test_only_required_files_are_downloaded(built, served):
    loads = served.loads("model/lab/torch")
    assert {"config.json", "pytorch_model.bin"} <= loads.keys()
    assert not loads.keys() & {"tf_model.h5", "onnx/config.json", "onnx/model.safetensors"}


def test_dataset_is_imported(built, served):
    workflow, process = built
    folder = workflow.folder / "output/data/both"
    assert folder.exists(), process.stdout
    assert rows(folder / "train.parquet") == TRAIN[0] + TRAIN[1]
    assert rows(folder / "eval.parquet") == EVAL
    manifest = json.loads((workflow.folder / "output/data/both.manifest.json").read_text())
    assert manifest["facts"]["commit"] == served.commit("dataset/lab/pairs")
    assert manifest["facts"]["licence"] == "mit"


def test_pickled_objects_in_weights_are_one_error_line_and_no_result(built, served):
    workflow, process = built
    assert process.returncode == 1
    log = (workflow.folder / "output/logs/fetch_model/harmful.log").read_text()
    assert "Traceback" not in log
    [line] = [line for line in log.splitlines() if line.startswith("error: ")]
    commit = served.commit("model/lab/harmful")
    expected = f"error: hub model lab/harmful at {commit}: pytorch_model.bin is damaged or"
    assert line.startswith(expected), line
    assert not [
        path for path in names(workflow.folder / "output/models") if path.startswith("harmful")
    ]


def test_pickled_objects_in_weights_are_not_run(built, served):
    assert not served.marker.exists()
    # Unpickling the object would have created the folder.
    make, arguments = Payload(served.marker).__reduce__()
    make(*arguments)
    assert served.marker.exists()
    served.marker.rmdir()
