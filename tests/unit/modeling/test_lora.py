"""LoRA: adapted layers, trained weights, merging and saving."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from conftest import SEQUENCES
from snakechat.modeling.loading import add_lora, load_causal, load_scorer, select_trained
from snakechat.modeling.models import DTYPES, make_causal
from snakechat.modeling.saving import save_model
from snakechat.modeling.vllm_sampler import merged_weights
from snakechat.workflow.errors import InputError
from support.families import FAMILIES

# The linear layers of the blocks of some families.
LAYERS = "fc1 fc2 k_proj out_proj q_proj v_proj"
LINEAR_LAYERS = {"opt": LAYERS, "opt-350m": LAYERS}
LINEAR_LAYERS["gemma3_text"] = "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"
EMBEDDINGS = "embeddings_and_norms"
IDS = torch.tensor(SEQUENCES[:1])


def logits_of(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def trained(model):
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def randomize_adapters(model):
    """Give a model adapters that are not zero."""
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.copy_(torch.randn(weight.shape, generator=random))
    return model


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["q_proj", "v_proj"], ["0.q_proj", "0.v_proj", "1.q_proj", "1.v_proj"]),
        (r".*layers\.1\..*(q|k)_proj", ["1.k_proj", "1.q_proj"]),
    ],
)
def test_named_layers_have_adapters(targets, expected, tokenizer):
    model = add_lora(make_causal(FAMILIES["opt"], tokenizer, 1), 2, 1, "none", targets)
    adapted = {tuple(name.partition(".lora_")[0].split(".")) for name in trained(model)}
    assert sorted(f"{parts[-3]}.{parts[-1]}" for parts in adapted) == expected
    # Layers without an adapter stay frozen beside embeddings and norms that are trained.
    model = add_lora(make_causal(FAMILIES["opt"], tokenizer, 1), 2, 1, EMBEDDINGS, targets)
    matrices = {name for name in trained(model) if name.endswith("_proj.weight")}
    assert not matrices
    assert any("embed_tokens" in name for name in trained(model))


@pytest.mark.parametrize(
    ("targets", "train_only", "message"),
    [
        (["q_proj", "qkv"], None, "qkv: the linear layers of the"),
        ("q_proj", None, r"q_proj: .*; a whole name is model\.decoder\.layers\.0"),
        (None, "mlp", "train_only: no weight of .* matches 'mlp'"),
    ],
)
def test_names_that_the_model_has_not_are_an_error(targets, train_only, message, tokenizer):
    settings = SimpleNamespace(lora_rank=2 if targets else 0, lora_alpha=1, train_base="none")
    settings.lora_target_modules, settings.train_only = targets, train_only
    with pytest.raises(InputError, match=message) as error:
        select_trained(make_causal(FAMILIES["opt"], tokenizer, 1), settings)
    assert "\n" not in str(error.value)


def test_weights_that_a_recipe_does_not_name_are_frozen(tokenizer):
    settings = SimpleNamespace(lora_rank=0, train_only=r"layers\.1\.|norm")
    model = select_trained(make_causal(FAMILIES["opt"], tokenizer, 1), settings)
    assert trained(model) == {
        name for name, _ in model.named_parameters() if ".layers.1." in name or "norm" in name
    }


@pytest.mark.parametrize(("family", "dtype"), [("opt", "bf16"), ("gpt2", "fp32")])
def test_merged_weights_are_summed_in_fp32_and_rounded_once(dtype, family, tokenizer, tmp_path):
    save_model(make_causal(FAMILIES[family], tokenizer, 1), tokenizer, tmp_path / "base")
    model = randomize_adapters(add_lora(load_causal(tmp_path / "base", dtype, tokenizer), 2, 3))
    model.to(DTYPES[dtype])
    expected = {
        name.replace(".base_layer.", "."): weight.double()
        for name, weight in model.state_dict().items()
        if ".lora_" not in name
    }
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    assert layers
    for name, layer in layers.items():
        lora_a, lora_b = (m["default"].weight.double() for m in (layer.lora_A, layer.lora_B))
        update = 3 / 2 * lora_b @ lora_a
        # GPT-2's weights are transposed.
        expected[f"{name}.weight"] += update.T if isinstance(layer.base_layer, Conv1D) else update
    save_model(model, tokenizer, tmp_path / "saved")
    assert {w.dtype for w in load_file(tmp_path / "saved/model.safetensors").values()} == {
        DTYPES[dtype]
    }
    saved = load_causal(tmp_path / "saved", dtype, tokenizer).state_dict()
    # What samplers get has the same bits.
    synced = dict(merged_weights(model))
    assert saved.keys() == expected.keys() == synced.keys()
    # One unit in the last place, where fp32 and fp64 round differently.
    tolerance = {"rtol": torch.finfo(DTYPES[dtype]).eps, "atol": 1e-6}
    for name, weight in saved.items():
        assert torch.equal(weight, synced.get(name, weight))
        torch.testing.assert_close(weight.double(), expected[name], **tolerance)
    # Without a dtype, from_pretrained loads the dtype of training.
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert config["dtype"] == str(DTYPES[dtype]).removeprefix("torch.")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").dtype == DTYPES[dtype]


@pytest.mark.parametrize(
    ("family", "has_head"), [("opt", False), ("opt-350m", True), ("gemma3_text", True)]
)
def test_peft_loads_the_adapter_on_its_base(family, has_head, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(make_causal(FAMILIES[family], tokenizer, 1), tokenizer, tmp_path / "base")
    load, auto_class = load_causal, AutoModelForCausalLM
    if has_head:
        load, auto_class = partial(load_scorer, new_head=True), AutoModelForSequenceClassification
    model = randomize_adapters(add_lora(load("base", "fp32", tokenizer), 2, 1))
    save_model(model, tokenizer, tmp_path / "saved")
    config = json.loads((tmp_path / "saved/adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "base"
    assert config["target_modules"] == LINEAR_LAYERS[family].split()
    names = {path.name for path in (tmp_path / "saved/adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    options = {"num_labels": 1, "pad_token_id": tokenizer.pad_token_id} if has_head else {}
    base = auto_class.from_pretrained("base", **options)
    again = PeftModel.from_pretrained(base, "saved/adapter", autocast_adapter_dtype=False)
    # Weights that were loaded twice may be aligned differently, which changes the order of sums.
    torch.testing.assert_close(logits_of(again), logits_of(model), rtol=1e-5, atol=1e-6)


def test_layers_that_peft_does_not_support_are_an_error_of_one_line():
    size = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba", **size))
    with pytest.raises(InputError, match=r"model_type mamba: .*: set lora_rank: 0"):
        add_lora(model, 2, 1)
