"""Devices, new models and copies of models."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
)

from conftest import INIT
from snakechat.modeling.loading import load_scorer
from snakechat.modeling.models import choose_device, copy_model, make_causal
from snakechat.modeling.saving import save_model
from snakechat.workflow.errors import InputError
from support.models import files, weights_equal

CPU = torch.device("cpu")


def test_a_placement_without_gpus_runs_on_the_cpu():
    assert choose_device({"gpus_per_node": 0}) == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_raises():
    with pytest.raises(InputError, match="gpus_per_node: 0"):
        choose_device({"gpus_per_node": 1})


def test_a_new_model_has_the_ids_of_its_tokenizer(model, tokenizer):
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.config.bos_token_id == tokenizer.bos_token_id
    assert model.config.hidden_size == 32


def test_the_seed_determines_the_weights(model, tokenizer):
    assert weights_equal(model, make_causal(INIT, tokenizer, 1))
    assert not weights_equal(model, make_causal(INIT, tokenizer, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "no-such-model"},
        # 32 is not a multiple of 5.
        {"num_attention_heads": 5},
        # An image encoder.
        {"model_type": "vit"},
    ],
)
def test_an_invalid_init_raises_an_error_of_one_line(tokenizer, changes):
    with pytest.raises(InputError) as error:
        make_causal({**INIT, **changes}, tokenizer, 1)
    assert "\n" not in str(error.value)


def test_an_init_without_a_model_type_raises(tokenizer):
    init = {key: value for key, value in INIT.items() if key != "model_type"}
    with pytest.raises(InputError):
        make_causal(init, tokenizer, 1)


def test_copying_keeps_weights_and_their_dtype(model, tokenizer, tmp_path):
    source = tmp_path / "source"
    save_model(model.to(torch.bfloat16), tokenizer, source)
    copy_model(source, tmp_path / "copy")
    copied = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype="auto")
    assert next(copied.parameters()).dtype == torch.bfloat16
    assert weights_equal(model, copied)


def test_copying_converts_torch_files_to_safetensors(model, folder, tmp_path):
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    copy_model(folder, tmp_path / "copy")
    names = files(tmp_path / "copy")
    assert "model.safetensors" in names
    assert "pytorch_model.bin" not in names
    assert weights_equal(model, AutoModelForCausalLM.from_pretrained(tmp_path / "copy"))


def test_a_copied_classifier_keeps_its_head(scorer_folder, tokenizer, tmp_path):
    copy_model(scorer_folder, tmp_path / "copy")
    copied, given = (load_scorer(f, "fp32", tokenizer) for f in (tmp_path / "copy", scorer_folder))
    assert weights_equal(copied, given)
    assert json.loads((tmp_path / "copy/config.json").read_text())["architectures"] == [
        "OPTForSequenceClassification"
    ]


def test_a_classifier_without_a_score_at_each_position_is_an_error(tmp_path):
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=20,
        num_labels=1,
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(InputError, match="BertForSequenceClassification has no score at each"):
        copy_model(tmp_path / "bert", tmp_path / "copy")
