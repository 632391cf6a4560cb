"""Saved models: each family in every use of training, and the files of weights."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from conftest import SEQUENCES
from snakechat.modeling import loading, saving
from snakechat.modeling.loading import add_lora, load_causal, load_scorer
from snakechat.modeling.models import (
    check_sequence_length,
    make_causal,
    model_size,
    supports_packing,
)
from snakechat.modeling.saving import count_stored_weights, save_model
from snakechat.workflow.errors import InputError
from support.families import FAMILIES, LLAMA, OPT

# Files of tiny models that have several.
SMALL = "10KB"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tokenizer, tmp_path_factory):
    """A saved model of the family, whose config on disk has dropout."""
    folder = tmp_path_factory.mktemp(family)
    save_model(make_causal(FAMILIES[family], tokenizer, 1), tokenizer, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {name: 0.5 for name in config if "drop" in name}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor(SEQUENCES[:1])).logits


def train_step(model):
    """Train for two steps; return the names of the weights that changed."""
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.Adam([w for w in model.parameters() if w.requires_grad], lr=0.01)
    # lora_A has no gradient while lora_B is zero, in the first step.
    for _ in range(2):
        optimizer.zero_grad()
        model.train()(torch.tensor(SEQUENCES[:1])).logits.square().mean().backward()
        optimizer.step()
    return {name for name, w in model.named_parameters() if not torch.equal(w, before[name])}


@pytest.mark.parametrize(
    ("load", "options", "rank"), [(load_scorer, {"new_head": True}, 0), (load_causal, {}, 2)]
)
def test_a_trained_model_is_saved_and_loaded(load, options, rank, folder, tokenizer, tmp_path):
    model = load(folder, "fp32", tokenizer, **options)
    if rank:
        model = add_lora(model, rank, 4)
    changed = train_step(model)
    assert changed
    if rank:
        assert changed == {name for name, w in model.named_parameters() if w.requires_grad}
    save_model(model, tokenizer, tmp_path / "saved")
    again = load(tmp_path / "saved", "fp32", tokenizer)
    # In training mode, in which dropout would change the outputs.
    trained, loaded = logits_of(model), logits_of(again)
    # fp32 rounding: loaded weights may be aligned differently in memory, which changes the order of
    # sums in a matrix product; merged adapters are multiplied in another order.
    torch.testing.assert_close(loaded, trained, rtol=1e-4 if rank else 1e-5, atol=1e-5)
    before = load(folder, "fp32", tokenizer, **options)
    assert not torch.allclose(loaded, logits_of(before), atol=1e-4)
    # Saving a loaded model gives the same bytes.
    save_model(again, tokenizer, tmp_path / "again")
    weights = [tmp_path / name / "model.safetensors" for name in ("saved", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_process_that_writes_nothing_merges_no_adapters(tokenizer, tmp_path, monkeypatch):
    model = add_lora(make_causal(FAMILIES["opt"], tokenizer, 1), 2, 4)
    monkeypatch.setattr(saving, "rank", lambda: 1)
    monkeypatch.setattr(saving, "merge_adapter", None)
    save_model(model, tokenizer, tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("family", ["opt", "opt-350m"], indirect=True, scope="module")
def test_a_new_head_has_standard_deviation_1_over_root_of_d_plus_1(family, folder, tokenizer):
    heads = []
    for seed in range(20):
        torch.manual_seed(seed)
        heads.append(load_scorer(folder, "fp32", tokenizer, new_head=True).score.weight.detach())
    width = 16 if family == "opt-350m" else 32
    assert heads[0].shape == (1, width)
    assert torch.cat(heads).std().item() == pytest.approx(1 / math.sqrt(width + 1), rel=0.1)


@pytest.mark.parametrize("family", ["opt", "bloom"], indirect=True, scope="module")
def test_attention_is_sdpa_whatever_the_config_on_disk(family, folder, tokenizer, tmp_path):
    model = load_causal(folder, "fp32", tokenizer)
    save_model(model, tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_implementation": "eager"}))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config._attn_implementation == "eager"
    assert not supports_packing(plain)
    expected = "eager" if family == "bloom" else "sdpa"
    assert load_causal(tmp_path, "fp32", tokenizer).config._attn_implementation == expected


ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONGROPE = {**LLAMA, "model_type": "phi3", "original_max_position_embeddings": 32}
LONGROPE["rope_scaling"] = ROPE


@pytest.mark.parametrize(
    ("init", "longest", "reason"),
    [(FAMILIES["opt"], 64, ": .*max_length"), (LONGROPE, 32, " before rope_type longrope")],
)
def test_sequences_longer_than_the_positions_raise(init, longest, reason, tokenizer):
    check_sequence_length(make_causal(FAMILIES["bloom"], tokenizer, 1), 10_000)
    model = make_causal(init, tokenizer, 1)
    check_sequence_length(model, longest)
    message = f"up to {longest + 1} tokens exceed the model's {longest} positions{reason}"
    with pytest.raises(InputError, match=message):
        check_sequence_length(model, longest + 1)


# Weights that are written file by file, and read in parts.


@pytest.fixture(params=["opt", "gemma3_text"])
def family_model(request, tokenizer):
    return make_causal(FAMILIES[request.param], tokenizer, 1).to(torch.bfloat16)


@pytest.mark.parametrize("size", ["50GB", SMALL])
def test_files_are_those_of_save_pretrained(size, family_model, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "MAX_FILE_SIZE", size)
    save_model(family_model, tokenizer, tmp_path / "saved")
    family_model.save_pretrained(tmp_path / "expected", max_shard_size=size)
    names, expected = (
        sorted(path.name for path in (tmp_path / name).glob("model*"))
        for name in ("saved", "expected")
    )
    assert names == expected
    assert len(names) > 2 if size == SMALL else names == ["model.safetensors"]
    for name in names:
        saved, expected = (tmp_path / folder / name for folder in ("saved", "expected"))
        assert saved.read_bytes() == expected.read_bytes()
    assert count_stored_weights(tmp_path / "saved") == model_size(family_model)["weights"]


@pytest.mark.parametrize("init", [OPT, {**LLAMA, "model_type": "mixtral", "num_local_experts": 4}])
def test_the_config_names_the_dtype_of_the_saved_weights(init, tokenizer, tmp_path):
    # transformers computes the weights in the files of a mixture from several ones of the model.
    model = make_causal(init, tokenizer, 1).to(torch.bfloat16)
    save_model(model, tokenizer, tmp_path, master=lambda weight: weight.detach().float())
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.float32


def state_of(model):
    """All that loading decides; deferred weights are read."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    for weight in weights.values():
        stored = loading.take_stored_weight(weight)
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
        assert any(hasattr(weight, loading.STORED) for weight in model.parameters()) == deferred
        # Adapters are drawn from the same state of the generator.
        loaded.append((*state_of(add_lora(model, 2, 4)), torch.rand(1).item()))
    (tensors, *values), (expected, *expected_values) = loaded
    assert values == expected_values
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name])
        assert tensor.dtype == expected[name].dtype
        assert tensor.requires_grad == expected[name].requires_grad


def test_a_saved_generation_config_stops_at_eos_and_at_the_ids_of_the_base_model(
    model, tokenizer, tmp_path
):
    # Its sampling settings are not saved.
    model.generation_config = GenerationConfig(repetition_penalty=1.3, eos_token_id=9)
    model.save_pretrained(tmp_path / "base")
    save_model(load_causal(tmp_path / "base", "fp32", tokenizer), tokenizer, tmp_path / "saved")
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").generation_config
    assert config.do_sample
    assert config.eos_token_id == [tokenizer.eos_token_id, 9]
    assert config.pad_token_id == tokenizer.pad_token_id
    assert config.repetition_penalty in (None, 1.0)
