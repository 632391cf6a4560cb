"""Making, loading and saving models, and their adapters."""

import math
import random

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from conftest import INIT
from init_model import train_tokenizer
from rlhf import toy
from rlhf.job import InputError
from rlhf.models import (
    add_lora,
    choose_device,
    copy_causal,
    load_causal,
    load_scorer,
    make_causal,
    save_model,
)
from rlhf.passes import Policy, Scorer

CPU = torch.device("cpu")


def weights_equal(first, second):
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def files(folder):
    return sorted(path.name for path in folder.iterdir())


# Placement and making.


def test_no_gpus_asked_means_the_cpu():
    assert choose_device({"gpus_per_node": 0}) == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_where_there_is_none_is_refused():
    with pytest.raises(InputError, match="gpus_per_node: 0"):
        choose_device({"gpus_per_node": 1})


def test_a_made_model_has_the_ids_of_its_tokenizer(model, tokenizer):
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.config.bos_token_id == tokenizer.bos_token_id
    assert model.config.hidden_size == 32


def test_same_seed_same_weights(model, tokenizer):
    assert weights_equal(model, make_causal(INIT, tokenizer, 1))
    assert not weights_equal(model, make_causal(INIT, tokenizer, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "no-such-model"},
        # 32 is no multiple of 5.
        {"num_attention_heads": 5},
        # An encoder of images, no language model.
        {"model_type": "vit"},
    ],
)
def test_an_init_that_makes_no_model_is_refused_in_one_line(tokenizer, changes):
    with pytest.raises(InputError) as error:
        make_causal({**INIT, **changes}, tokenizer, 1)
    assert "\n" not in str(error.value)


def test_an_init_without_a_model_type_is_refused(tokenizer):
    init = {key: value for key, value in INIT.items() if key != "model_type"}
    with pytest.raises(InputError):
        make_causal(init, tokenizer, 1)


# Loading and saving.


def outputs(module, batch):
    """How many different outputs eight passes in training mode give."""
    module.train()
    return len({tuple(module(*batch).tolist()) for _ in range(8)})


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "layerdrop"])
def test_dropout_is_off_whatever_the_config_on_disk_says(folder, tokenizer, batch, name):
    config = AutoConfig.from_pretrained(folder)
    setattr(config, name, 0.5)
    config.save_pretrained(folder)
    # The plain model does drop: the test would see it.
    assert outputs(Policy(AutoModelForCausalLM.from_pretrained(folder)), batch) > 1
    policy = Policy(load_causal(folder, "fp32", tokenizer))
    assert outputs(policy, batch) == 1
    assert torch.equal(policy.train()(*batch), policy.eval()(*batch))
    assert outputs(Scorer(load_scorer(folder, "fp32", tokenizer, new_head=True)), batch) == 1


def test_a_saved_model_is_safetensors_that_transformers_loads(model, folder, tokenizer):
    assert "model.safetensors" in files(folder)
    assert not [name for name in files(folder) if name.endswith((".bin", ".pt", ".pth"))]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert weights_equal(model, loaded)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()
    assert weights_equal(model, load_causal(folder, "fp32", tokenizer))


def test_a_saved_model_samples_and_ends_by_the_tokenizers_eos(model, tokenizer, tmp_path):
    # What a base model's own generation config says of sampling is not ours.
    model.generation_config = GenerationConfig(repetition_penalty=1.3, top_k=5, eos_token_id=9)
    save_model(model, tokenizer, tmp_path)
    config = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert config.do_sample
    assert config.eos_token_id == tokenizer.eos_token_id
    assert config.pad_token_id == tokenizer.pad_token_id
    assert config.repetition_penalty in (None, 1.0)


def test_a_vocabulary_larger_than_the_embeddings_is_refused(folder, tokenizer):
    rows, _ = toy.make_rows(100, 10, random.Random(1))
    larger = train_tokenizer((text for row in rows for text in row.values()), 310)
    assert len(larger) > len(tokenizer)
    with pytest.raises(InputError, match="310 tokens, but 300 embeddings"):
        load_causal(folder, "fp32", larger)
    with pytest.raises(InputError, match="310 tokens, but 300 embeddings"):
        load_scorer(folder, "fp32", larger, new_head=True)


def test_copying_keeps_weights_and_their_numbers(model, tokenizer, tmp_path):
    source = tmp_path / "source"
    save_model(model.to(torch.bfloat16), tokenizer, source)
    copy_causal(source, tmp_path / "copy")
    copied = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype="auto")
    assert next(copied.parameters()).dtype == torch.bfloat16
    assert weights_equal(model, copied)


def test_copying_makes_safetensors_of_torchs_format(model, folder, tmp_path):
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    copy_causal(folder, tmp_path / "copy")
    names = files(tmp_path / "copy")
    assert "model.safetensors" in names
    assert "pytorch_model.bin" not in names
    assert weights_equal(model, AutoModelForCausalLM.from_pretrained(tmp_path / "copy"))


# Models with a score head.


def test_a_folder_without_a_head_is_refused_as_a_scorer(folder, tokenizer):
    with pytest.raises(InputError, match=r"weights are missing: score\.weight"):
        load_scorer(folder, "fp32", tokenizer)


def test_a_new_head_has_deviation_1_over_root_of_d_plus_1(folder, tokenizer):
    weights = []
    for seed in range(20):
        torch.manual_seed(seed)
        head = load_scorer(folder, "fp32", tokenizer, new_head=True).score.weight
        assert head.shape == (1, 32)
        weights.append(head.detach())
    weights = torch.cat(weights)
    # 1 / sqrt(33) = .174 of 640 weights, whose standard error is .174 / sqrt(1280) = .0049.
    assert weights.std().item() == pytest.approx(1 / math.sqrt(33), abs=0.015)
    assert weights.mean().item() == pytest.approx(0.0, abs=0.03)


def test_a_new_head_leaves_the_language_model_as_it_is(model, folder, tokenizer):
    scorer = load_scorer(folder, "fp32", tokenizer, new_head=True)
    assert weights_equal(model.base_model, scorer.base_model)


def test_a_reloaded_scorer_is_the_one_that_was_saved(scorer_folder, tokenizer):
    assert "model.safetensors" in files(scorer_folder)
    assert not [name for name in files(scorer_folder) if name.endswith((".bin", ".pt"))]
    loaded = AutoModelForSequenceClassification.from_pretrained(scorer_folder)
    assert loaded.config.num_labels == 1
    assert weights_equal(load_scorer(scorer_folder, "fp32", tokenizer), loaded)


# LoRA.


def test_new_adapters_change_nothing(folder, tokenizer, batch):
    plain = Policy(load_causal(folder, "fp32", tokenizer))
    adapted = Policy(add_lora(load_causal(folder, "fp32", tokenizer), 2, 1))
    torch.testing.assert_close(adapted(*batch), plain(*batch))


def test_adapters_alone_are_trained_on_all_linear_layers_but_the_output(folder, tokenizer):
    model = add_lora(load_causal(folder, "fp32", tokenizer), 2, 1)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    layers = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in trained}
    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
    expected = {
        f"model.decoder.layers.{layer}.{part}"
        for layer in range(2)
        for part in (*projections, "fc1", "fc2")
    }
    assert layers == expected


def with_learnt_adapters(folder, tokenizer, alpha=1):
    """A model whose adapters (rank 2) are not zero."""
    model = add_lora(load_causal(folder, "fp32", tokenizer), 2, alpha)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.copy_(torch.randn(weight.shape, generator=random))
    return model


def test_adapters_are_merged_when_saved(folder, tokenizer, batch, tmp_path):
    model = with_learnt_adapters(folder, tokenizer)
    adapted = Policy(model)(*batch)
    save_model(model, tokenizer, tmp_path / "merged")
    assert sorted(files(tmp_path / "merged")) == sorted(files(folder))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(folder)
    assert plain.state_dict().keys() == base.state_dict().keys()
    torch.testing.assert_close(Policy(plain)(*batch), adapted, rtol=1e-4, atol=1e-4)
    # The adapters did something: the test would see them lost.
    assert (Policy(base)(*batch) - adapted).abs().max() > 0.01


def test_adapters_are_scaled_by_alpha_over_rank(folder, tokenizer, tmp_path):
    model = with_learnt_adapters(folder, tokenizer, alpha=8)
    name = "model.decoder.layers.1.fc1"
    layer = model.get_base_model().get_submodule(name)
    before = layer.base_layer.weight.detach().clone()
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    save_model(model, tokenizer, tmp_path / "merged")
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").get_submodule(name).weight
    # 8 / 2.
    torch.testing.assert_close(after, before + 4 * product)


def test_saving_the_same_model_twice_gives_the_same_bytes(model, tokenizer, tmp_path):
    for name in ("first", "second"):
        save_model(model, tokenizer, tmp_path / name)
    assert files(tmp_path / "first") == files(tmp_path / "second")
    for name in files(tmp_path / "first"):
        first, second = (tmp_path / folder / name for folder in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()
