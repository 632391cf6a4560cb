"""Devices and new models."""

import pytest
import torch

from conftest import INIT
from snakechat.modeling.models import choose_device, make_causal
from snakechat.workflow.errors import InputError
from snakechat.workflow.placement import placement_of
from support.models import weights_equal


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_raises():
    with pytest.raises(InputError, match="gpus_per_node: 0"):
        choose_device(placement_of({"gpus_per_node": 1}))


def test_the_seed_determines_the_weights(model, tokenizer):
    assert weights_equal(model, make_causal(INIT, tokenizer, 1))
    assert not weights_equal(model, make_causal(INIT, tokenizer, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "no-such-model"},
        # 32 is not a multiple of 5.
        {"num_attention_heads": 5},
        {"num_hidden_layers": 10_000_000},
        {"attn_implementation": "kernels-community/flash-attn"},
    ],
)
def test_an_invalid_init_raises_an_error_of_one_line(tokenizer, changes):
    with pytest.raises(InputError) as error:
        make_causal({**INIT, **changes}, tokenizer, 1)
    assert "\n" not in str(error.value)
