"""Devices and new models."""

import pytest
import torch

from conftest import INIT
from snakechat.modeling.models import choose_device, make_causal
from snakechat.workflow.errors import InputError
from support.models import weights_equal

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
        {"num_attention_heads": 0},
        # transformers wants a float.
        {"init_std": 1},
        {"hidden_size": 32.0},
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
