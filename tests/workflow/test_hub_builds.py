"""Builds of models and datasets of a hub: a local server that implements its protocol."""

import io
import json
import os

import pytest
import torch
import yaml

from conftest import INIT, Workflow, copy_sources
from snakechat.data.records import read_texts
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from support.files import as_parquet
from support.hub import serving

ROWS = [
    {"prompt": f"\n\nHuman: {number}?\n\nAssistant:", "chosen": f" {number}.", "rejected": " No."}
    for number in range(50)
]
# Its second config has splits of other names.
CARD = b"""---
license: mit
configs:
- {config_name: default, data_files: none.parquet}
- config_name: second
  data_files: [{split: first, path: x/a*}, {split: held_out, path: x/b.parquet}]
---
"""
DATASET = {
    "README.md": CARD,
    "x/a-1.parquet": as_parquet(ROWS[:25]),
    "x/a-2.parquet": as_parquet(ROWS[25:40]),
    "x/b.parquet": as_parquet(ROWS[40:]),
    "x/c.parquet": as_parquet(ROWS[:3]),
}
SPLITS = {"train": "first", "eval": "held_out"}
CONFIG = {
    "models": {"torch": {"hub": "lab/torch"}, "harmful": {"hub": "lab/harmful"}},
    "datasets": {"far": {"hub": "lab/far", "format": "plain", "name": "second", "split": SPLITS}},
}
RESULTS = ("models/torch", "models/harmful", "data/far")


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


@pytest.fixture
def model_files(tokenizer, tmp_path):
    """A function that returns the files of a model with weights of torch, and further objects."""
    model = make_causal(INIT, tokenizer, 1)
    save_model(model, tokenizer, tmp_path / "served")
    files = {path.name: path.read_bytes() for path in (tmp_path / "served").iterdir()}
    del files["model.safetensors"]
    return lambda **more: {
        **files,
        "pytorch_model.bin": torch_bytes({**model.state_dict(), **more}),
    }


def test_models_and_datasets_are_stored_and_pickled_objects_are_not_run(model_files, tmp_path):
    folder, marker = tmp_path / "work", tmp_path / "ran"
    copy_sources(folder)
    (folder / "mine.yaml").write_text(yaml.safe_dump(CONFIG))
    workflow = Workflow(folder, "--configfile", "mine.yaml")
    with serving() as hub:
        hub.repositories = {
            "model/lab/torch": model_files(),
            "model/lab/harmful": model_files(payload=Payload(marker)),
            "dataset/lab/far": DATASET,
        }
        workflow.environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
        workflow.environment |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1,localhost"}
        targets = [f"output/{result}.manifest.json" for result in RESULTS]
        process = workflow.snakemake(*targets, "--keep-going", "--cores", "2")
    assert process.returncode == 1

    model, data = folder / "output/models/torch", folder / "output/data/far"
    assert (model / "model.safetensors").exists(), process.stdout
    assert not (model / "pytorch_model.bin").exists()
    # The repository of the model has no card.
    for result, repository, licence in (
        (model, "model/lab/torch", None),
        (data, "dataset/lab/far", "mit"),
    ):
        facts = json.loads((result / "manifest.json").read_text())["facts"]
        expected = {"commit": hub.commit(repository), "licence": licence}
        assert facts.items() >= expected.items()
    for split, rows in (("train", ROWS[:40]), ("eval", ROWS[40:])):
        found = list(read_texts(data / f"{split}.parquet"))
        assert found == [tuple(row.values()) for row in rows]

    log = (folder / "output/logs/fetch_model/harmful.log").read_text()
    assert "Traceback" not in log
    [line] = [line for line in log.splitlines() if line.startswith("error: ")]
    place = f"hub model lab/harmful at {hub.commit('model/lab/harmful')}"
    assert line.startswith(f"error: {place}: pytorch_model.bin is damaged or"), line
    assert not list((folder / "output/models").glob("harmful*"))
    assert not marker.exists()
