"""Copies of models: their files, what is checked, and the memory that they need."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)

from conftest import ROOT
from snakechat.modeling.copying import copy_model
from snakechat.modeling.deferred_weights import stored_weight
from snakechat.modeling.loading import load_causal
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from snakechat.workflow.errors import InputError
from support.families import FAMILIES
from support.models import files

SCRIPTS = ROOT / "scripts"
INDEX = "model.safetensors.index.json"
# Files of tiny models that have several.
SMALL = "10KB"


@pytest.fixture(params=["opt", "gemma3_text"])
def family_model(request, tokenizer):
    return make_causal(FAMILIES[request.param], tokenizer, 1).to(torch.bfloat16)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def as_torch_files(folder):
    """Replace the safetensors of a folder by files in PyTorch's format."""
    for path in folder.glob("*.safetensors"):
        name = path.name.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin")
        torch.save(load_file(path), folder / name)
        path.unlink()
    if (folder / INDEX).exists():
        text = (folder / INDEX).read_text()
        text = text.replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
        (folder / "pytorch_model.bin.index.json").write_text(text)
        (folder / INDEX).unlink()


@pytest.mark.parametrize(("form", "size"), [("safetensors", "50GB"), ("torch", SMALL)])
def test_the_copy_has_the_files_of_save_pretrained(form, size, family_model, tmp_path):
    source = tmp_path / "source"
    family_model.save_pretrained(source, max_shard_size=size)
    expected = contents(source)
    assert ("model.safetensors" in expected) == (size != SMALL)
    if form == "torch":
        as_torch_files(source)
    copy_model(source, tmp_path / "copy")
    assert contents(tmp_path / "copy") == expected


def test_files_keep_their_dtype_and_are_loaded_in_that_of_a_recipe(model, tokenizer, tmp_path):
    save_model(model.to(torch.bfloat16), tokenizer, tmp_path / "source")
    # Files may have another dtype than config.json.
    weights = load_file(tmp_path / "source/model.safetensors")
    stored = {name: weight.half() for name, weight in weights.items()}
    save_file(stored, tmp_path / "source/model.safetensors", metadata={"format": "pt"})
    copy_model(tmp_path / "source", tmp_path / "copy")
    copied = load_file(tmp_path / "copy/model.safetensors")
    assert all(torch.equal(stored[name], copied[name]) for name in stored)
    loaded = load_causal(tmp_path / "copy", "bf16", tokenizer)
    assert loaded.dtype == torch.bfloat16
    deferred = load_causal(tmp_path / "copy", "bf16", tokenizer, deferred=True)
    expected = dict(loaded.named_parameters())
    for name, weight in deferred.named_parameters():
        values = torch.empty(weight.numel(), dtype=torch.bfloat16)
        stored_weight(weight).copy_to(values)
        assert torch.equal(values.view_as(weight), expected[name])


def test_torch_files_are_converted_and_store_tied_weights_once(model, folder, tmp_path):
    expected = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    # Both names of the output layer.
    assert {"lm_head.weight", "model.decoder.embed_tokens.weight"} <= model.state_dict().keys()
    torch.save(
        model.state_dict(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )
    copy_model(folder, tmp_path / "copy")
    assert not [name for name in files(tmp_path / "copy") if name.endswith(".bin")]
    assert (tmp_path / "copy/model.safetensors").read_bytes() == expected


def test_tied_weights_that_differ_are_both_kept(model, folder, tmp_path):
    # from_pretrained does not tie them either.
    changed = {name: weight.clone() for name, weight in model.state_dict().items()}
    changed["lm_head.weight"] += 1
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    copy_model(folder, tmp_path / "copy")
    assert load_file(tmp_path / "copy/model.safetensors").keys() == changed.keys()


def cut(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-9])


def remove_file(folder):
    (folder / "model-00002-of-00003.safetensors").unlink()


def change_shape(folder):
    path = folder / "model-00002-of-00003.safetensors"
    weights = load_file(path)
    weights[min(weights)] = torch.ones(3)
    save_file(weights, path, metadata={"format": "pt"})


def lead_outside(folder):
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace("model-00002", "../model-00002"))


DAMAGES = {
    cut: r"model-00002-of-00003\.safetensors is damaged \(",
    remove_file: rf"{INDEX} names model-00002-of-00003\.safetensors, which the folder does not",
    lead_outside: rf"{INDEX} names \.\./model-00002-of-00003\.safetensors, which the folder does",
    change_shape: r"weights do not have the model's shape: model\.decoder\.",
    lambda folder: (folder / INDEX).unlink(): "there are no weights: expected model.safetensors or",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_an_error_of_one_line_without_a_copy(damage, model, tmp_path):
    model.save_pretrained(tmp_path / "source", max_shard_size="50KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) == 3
    damage(tmp_path / "source")
    with pytest.raises(InputError, match=DAMAGES[damage]) as error:
        copy_model(tmp_path / "source", tmp_path / "copy")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "copy").exists()


UNKNOWN = "unknown.weight"
PEAK = """
import re, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from snakechat.modeling.copying import copy_model
copy_model(Path(sys.argv[2]), Path(sys.argv[3]))
# getrusage would include the peak of the parent process.
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def write_sparse_weights(folder, config):
    """Write a valid safetensors file whose weights take no space on the disk.

    It has a weight that the model does not have: the others are then written one by one.
    """
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    weights[UNKNOWN] = torch.empty(1, dtype=torch.bfloat16)
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, weight in weights.items():
        start, end = end, end + 2 * weight.numel()
        offsets = [start, end]
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_2_gigabytes_are_copied_in_less_than_1_of_memory(tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    config = AutoConfig.for_model(
        "llama", vocab_size=300, hidden_size=4096, intermediate_size=11008, num_hidden_layers=5
    )
    config.save_pretrained(source)
    write_sparse_weights(source, config)
    if (source / "model.safetensors").stat().st_blocks > 1000:
        pytest.skip("the file system has no sparse files")
    command = [sys.executable, "-c", PEAK, SCRIPTS, source, copy]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    with safe_open(copy / "model.safetensors", "pt") as file:
        assert UNKNOWN not in file.keys()  # noqa: SIM118
    size = (copy / "model.safetensors").stat().st_size
    # pytest keeps its folders of several runs.
    (copy / "model.safetensors").unlink()
    assert size > 2e9
    assert int(process.stdout) < 1e6
