"""fetch_model on models of local folders, in this process: copies, and what is checked.

RLHF with such models: test_rlhf.py.
"""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import fetch_model
from fetch_model import copy_model
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import file_digest
from snakechat.workflow.processes import RunOptions
from support.chat_templates import CHATML

THINKING = CHATML + "{% if add_generation_prompt and not enable_thinking %}<think>{% endif %}"

INDEX = "model.safetensors.index.json"
# Files of tiny models that have several.
SMALL = "10KB"


@pytest.fixture
def fetch(folder, tmp_path):
    """A function that fetches the model of `folder`; it returns the job."""

    def fetch(**settings):
        files = {path.name: file_digest(path) for path in folder.iterdir()}
        job = SimpleNamespace(
            settings=SimpleNamespace(card={"licence": "mit"}, **settings),
            options=RunOptions(source=str(folder)),
            spec={"name": "mine", "files": files},
            result=tmp_path / "result",
            facts={},
        )
        job.result.mkdir()
        fetch_model.main(job)
        return job

    return fetch


def test_template_arguments_are_part_of_the_template(fetch, folder):
    (folder / "chat_template.jinja").write_text(THINKING)
    job = fetch(template_arguments={"enable_thinking": True})
    assert job.facts == {"licence": "mit"}

    def rendered(path, **arguments):
        messages = [{"role": "user", "content": "Hello"}]
        return AutoTokenizer.from_pretrained(path).apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **arguments
        )

    # Undefined, the argument is false in the given template.
    assert rendered(job.result) == rendered(folder, enable_thinking=True) != rendered(folder)
    assert rendered(job.result, enable_thinking=False) == rendered(folder)


@pytest.mark.parametrize("size", ["50GB", SMALL])
def test_the_copy_is_what_save_pretrained_writes(size, model, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch_model, "MAX_FILE_SIZE", size)
    source, copy = tmp_path / "source", tmp_path / "copy"
    model.to(torch.bfloat16).save_pretrained(source, max_shard_size=size)
    copy_model(source, copy)
    again = type(model).from_pretrained(copy)
    assert again.dtype == torch.bfloat16
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert (copy / INDEX).exists() == (size == SMALL)
    for name in ("config.json", "generation_config.json"):
        assert (copy / name).read_bytes() == (source / name).read_bytes()


def test_the_dtype_is_that_of_the_files(folder, tmp_path):
    # Without weights that the model does not have.
    stored = load_file(folder / "model.safetensors")
    unknown = {"unknown.weight": torch.ones(3)}
    save_file(stored | unknown, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, dtype="float16")
    copy_model(folder, tmp_path / "copy")
    copied = load_file(tmp_path / "copy/model.safetensors")
    assert copied.keys() == stored.keys()
    assert all(torch.equal(copied[name], weight) for name, weight in stored.items())
    assert json.loads((tmp_path / "copy/config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(("kept", "dtype"), [("q_proj", "float32"), ("norm", "bfloat16")])
def test_weights_of_several_dtypes_keep_their_values(kept, dtype, folder, tmp_path):
    stored = load_file(folder / "model.safetensors")
    # The weights of norms are 1, and their biases 0.
    rounded = {name: stored[name].bfloat16() for name in stored if kept not in name}
    rounded |= {name: stored[name].to(torch.float8_e5m2) for name in stored if "k_proj" in name}
    save_file(stored | rounded, folder / "model.safetensors", metadata={"format": "pt"})
    copy_model(folder, tmp_path / "copy")
    copied = load_file(tmp_path / "copy/model.safetensors")
    for name, weight in (stored | rounded).items():
        assert copied[name].dtype == getattr(torch, dtype)
        torch.testing.assert_close(copied[name].float(), weight.float(), rtol=0, atol=0)


def test_torch_files_are_converted_and_store_tied_weights_once(model, folder, tmp_path):
    expected = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    # Both names of the output layer.
    assert {"lm_head.weight", "model.decoder.embed_tokens.weight"} <= model.state_dict().keys()
    torch.save(
        model.state_dict(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )
    copy_model(folder, tmp_path / "copy")
    assert not (tmp_path / "copy/pytorch_model.bin").exists()
    assert (tmp_path / "copy/model.safetensors").read_bytes() == expected


class Payload:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickled_objects_are_not_run(model, folder, tmp_path):
    (folder / "model.safetensors").unlink()
    content = {**model.state_dict(), "payload": Payload(tmp_path / "ran")}
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin is damaged or has pickled"):
        copy_model(folder, tmp_path / "copy")
    assert not (tmp_path / "ran").exists()


def test_weights_that_share_memory_are_all_copied(model, folder, tmp_path):
    """Tools that gather partitions save views of one tensor, and equal weights need not be tied."""
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    del shapes["lm_head.weight"]
    memory = torch.randn(sum(shape.numel() for shape in shapes.values()))
    parts = memory.split([shape.numel() for shape in shapes.values()])
    weights = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
    norms = [name for name in weights if name.endswith("layer_norm.weight")]
    weights[norms[1]] = weights[norms[0]]
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    copy_model(folder, tmp_path / "copy")
    copied = load_file(tmp_path / "copy/model.safetensors")
    assert copied.keys() == weights.keys()
    assert all(torch.equal(copied[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("is_equal", [True, False])
def test_weights_of_two_formats_are_the_same(is_equal, model, folder, tmp_path):
    weights = {name: weight.half() for name, weight in model.state_dict().items()}
    if not is_equal:
        weights["model.decoder.final_layer_norm.weight"] += 1
    torch.save(weights, folder / "pytorch_model.bin")
    if is_equal:
        copy_model(folder, tmp_path / "copy")
        return
    with pytest.raises(InputError, match=r"different weights \(model.decoder.final_layer_norm"):
        copy_model(folder, tmp_path / "copy")


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_kernel_that_a_config_names_is_not_loaded(key, folder, tmp_path):
    change_config(folder, **{key: "kernels-community/flash-attn"})
    copy_model(folder, tmp_path / "copy")
    assert "kernels-community" not in (tmp_path / "copy/config.json").read_text()


def change_shape(folder):
    path = folder / "model-00002-of-00003.safetensors"
    weights = load_file(path)
    weights[min(weights)] = torch.ones(3)
    save_file(weights, path, metadata={"format": "pt"})


def lead_outside(folder):
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace("model-00002", "../model-00002"))


DAMAGES = {
    lead_outside: rf"{INDEX} names \.\./model-00002-of-00003\.safetensors, which the folder does",
    change_shape: r"weights do not have the model's shape: model\.decoder\.",
    lambda folder: (folder / INDEX).unlink(): "no weights: expected model.safetensors or",
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
