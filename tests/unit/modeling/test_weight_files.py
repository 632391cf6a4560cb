"""Saved models: weights that are read in parts and written file by file, and what stops them."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from snakechat.modeling import loading, saving
from snakechat.modeling.loading import STORED, load_causal, load_scorer, take_stored_weight
from snakechat.modeling.lora import add_lora
from snakechat.modeling.models import make_causal, model_size
from snakechat.modeling.saving import save_model
from support.families import FAMILIES
from support.models import files

# Files of tiny models that have several.
SMALL = "10KB"


@pytest.fixture(params=["opt", "gemma3_text"])
def family_model(request, tokenizer):
    return make_causal(FAMILIES[request.param], tokenizer, 1).to(torch.bfloat16)


@pytest.mark.parametrize("size", ["50GB", SMALL])
def test_files_are_those_of_save_pretrained(size, family_model, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "MAX_FILE_SIZE", size)
    save_model(family_model, tokenizer, tmp_path / "saved")
    family_model.save_pretrained(tmp_path / "expected", max_shard_size=size)
    names = [name for name in files(tmp_path / "expected") if name.startswith("model")]
    assert names == [name for name in files(tmp_path / "saved") if name.startswith("model")]
    assert len(names) > 2 if size == SMALL else names == ["model.safetensors"]
    for name in names:
        saved, expected = (tmp_path / folder / name for folder in ("saved", "expected"))
        assert saved.read_bytes() == expected.read_bytes()


def state_of(model):
    """All that loading decides; deferred weights are read."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    for weight in weights.values():
        stored = take_stored_weight(weight)
        if stored is not None:
            assert weight.untyped_storage().nbytes() == weight.element_size()
            weight.data = stored.to(weight.dtype)
    return weights | dict(model.named_buffers()), model_size(model), model.config.to_dict()


@pytest.mark.parametrize(("new_head", "dtype"), [(False, "bf16"), (True, "fp32")])
def test_a_deferred_model_is_the_loaded_one(
    new_head, dtype, family_model, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(saving, "MAX_FILE_SIZE", SMALL)
    save_model(family_model, tokenizer, tmp_path)
    loaded = []
    for deferred in (False, True):
        torch.manual_seed(3)
        if new_head:
            model = load_scorer(tmp_path, dtype, tokenizer, new_head=True, deferred=deferred)
        else:
            model = load_causal(tmp_path, dtype, tokenizer, deferred)
        assert any(hasattr(weight, STORED) for weight in model.parameters()) == deferred
        # Adapters are drawn from the same state of the generator.
        loaded.append((*state_of(add_lora(model, 2, 4)), torch.rand(1).item()))
    (tensors, *values), (expected, *expected_values) = loaded
    assert values == expected_values
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name])
        assert tensor.dtype == expected[name].dtype
        assert tensor.requires_grad == expected[name].requires_grad


def test_damaged_files_raise(folder, tokenizer):
    (folder / "model.safetensors").write_bytes(b"\x10" + bytes(20))
    with pytest.raises(Exception, match="damaged") as error:
        loading.weight_files(folder)
    assert "\n" not in str(error.value)


def test_a_saved_generation_config_stops_at_eos_and_at_the_ids_of_the_base_model(
    model, tokenizer, tmp_path
):
    # Its sampling settings are not saved.
    model.generation_config = GenerationConfig(repetition_penalty=1.3, top_k=5, eos_token_id=9)
    save_model(model, tokenizer, tmp_path)
    config = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert config.do_sample
    assert config.eos_token_id == [tokenizer.eos_token_id, 9]
    assert config.pad_token_id == tokenizer.pad_token_id
    assert config.repetition_penalty in (None, 1.0)
