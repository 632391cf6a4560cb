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

ROWS = [(f"\n\nHuman: {number}?\n\nAssistant:", f" {number}.", " No.") for number in range(50)]


def parquet(rows):
    return as_parquet(
        [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows]
    )


PAIRS = {
    "README.md": b"---\nlicense: mit\n---\n# Pairs\n",
    "data/train-00000-of-00002.parquet": parquet(ROWS[:25]),
    "data/train-00001-of-00002.parquet": parquet(ROWS[25:40]),
    "data/test-00000-of-00001.parquet": parquet(ROWS[40:]),
    "top.parquet": parquet(ROWS[:3]),
}
# Must not be downloaded: these files have no weights.
USELESS = {"tf_model.h5": b"", "onnx/config.json": b"", "onnx/model.safetensors": b""}
GLOBS = {"train": "data/train-*.parquet", "eval": "data/test-*.parquet"}
CONFIG = {
    "models": {"torch": {"hub": "lab/torch"}, "harmful": {"hub": "lab/harmful"}},
    "datasets": {"both": {"hub": "lab/pairs", "format": "plain", **GLOBS}},
}
TARGETS = [
    f"output/{result}.manifest.json" for result in ("models/torch", "models/harmful", "data/both")
]


class Payload:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def torch_bytes(content):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def model(tokenizer):
    return make_causal(INIT, tokenizer, 1)


@pytest.fixture(scope="module")
def built(model, tokenizer, tmp_path_factory):
    """The hub, a workflow that has built everything, its process, and the folder of Payload."""
    folder = tmp_path_factory.mktemp("hub")
    copy_sources(folder)
    (folder / "mine.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "served").mkdir()
    save_model(model, tokenizer, folder / "served")
    bare = {path.name: path.read_bytes() for path in (folder / "served").iterdir()}
    del bare["model.safetensors"]
    weights = model.state_dict()
    # The names in OPT's files on the hub: those of the model without its tied head.
    headless = {
        name.removeprefix("model."): tensor
        for name, tensor in weights.items()
        if name != "lm_head.weight"
    }
    harmful = {**weights, "payload": Payload(folder / "ran")}
    with serving() as hub:
        hub.repositories = {
            "model/lab/torch": {**bare, **USELESS, "pytorch_model.bin": torch_bytes(headless)},
            "model/lab/harmful": {**bare, "pytorch_model.bin": torch_bytes(harmful)},
            "dataset/lab/pairs": PAIRS,
        }
        workflow = Workflow(folder, "--configfile", "mine.yaml")
        workflow.environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "home")}
        workflow.environment |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1,localhost"}
        process = workflow.snakemake(*TARGETS, "--keep-going", "--cores", "2")
        yield hub, workflow, process, folder / "ran"


def facts(folder):
    return json.loads((folder / "manifest.json").read_text())["facts"]


def test_a_model_is_stored_as_safetensors(built, model, tokenizer):
    hub, workflow, process, _ = built
    folder = workflow.folder / "output/models/torch"
    assert folder.exists(), process.stdout
    assert (folder / "model.safetensors").exists()
    assert not [path for path in folder.iterdir() if path.suffix in (".bin", ".h5", ".pt")]
    # The repository has no card.
    assert facts(folder) == {"commit": hub.commit("model/lab/torch"), "licence": None}
    arrived = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert arrived.keys() == model.state_dict().keys()
    assert all(torch.equal(arrived[key], tensor) for key, tensor in model.state_dict().items())
    text = "\n\nHuman: Name 2 fruits.\n\nAssistant:"
    assert AutoTokenizer.from_pretrained(folder)(text) == tokenizer(text)
    loads = hub.loads("model/lab/torch")
    assert {"config.json", "pytorch_model.bin"} <= loads.keys()
    assert not loads.keys() & USELESS.keys()


def test_a_dataset_is_imported(built):
    hub, workflow, process, _ = built
    folder = workflow.folder / "output/data/both"
    assert folder.exists(), process.stdout
    assert list(read_texts(folder / "train.parquet")) == ROWS[:40]
    assert list(read_texts(folder / "eval.parquet")) == ROWS[40:]
    assert facts(folder)["commit"] == hub.commit("dataset/lab/pairs")
    assert facts(folder)["licence"] == "mit"


def test_pickled_objects_in_weights_are_not_run_but_one_error_line(built):
    hub, workflow, process, marker = built
    assert process.returncode == 1
    log = (workflow.folder / "output/logs/fetch_model/harmful.log").read_text()
    assert "Traceback" not in log
    [line] = [line for line in log.splitlines() if line.startswith("error: ")]
    commit = hub.commit("model/lab/harmful")
    expected = f"error: hub model lab/harmful at {commit}: pytorch_model.bin is damaged or"
    assert line.startswith(expected), line
    assert not list((workflow.folder / "output/models").glob("harmful*"))
    assert not marker.exists()
    # Unpickling the object would have created the folder.
    make, arguments = Payload(marker).__reduce__()
    make(*arguments)
    assert marker.exists()
