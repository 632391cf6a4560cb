"""Sizes and activation memory of models, from models of a few layers."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from snakechat.estimates.job_estimate import PlannedSizes, TokenCounts
from snakechat.estimates.memory import (
    POLICY,
    SCORE,
    SFT,
    BatchShape,
    ModelSpec,
    activation_peak,
    measure_size,
)
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import Placement
from support.families import FAMILIES
from support.specs import opt_config, small_spec


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_extrapolated_to_all_layers(family):
    layers = "n_layer" if family in ("gpt2", "bloom") else "num_hidden_layers"
    keys = FAMILIES[family] | {"num_hidden_layers": 5}
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys))
    expected = sum(weight.numel() for weight in whole.parameters())
    config = {layers if key == "num_hidden_layers" else key: v for key, v in keys.items()}
    size = measure_size(ModelSpec(json.dumps(config), SFT, "bf16"))
    assert (size["weights"], size["trained"], size["layers"]) == (expected, expected, 5)


def test_sizes_by_hand():
    # A layer: matrices 12 * 64, their biases 9 * 8, two norms 2 * 16. Outside the layers: token
    # embeddings 32 * 8, position embeddings 16 * 8, a norm 16.
    layer = 768 + 72 + 32
    size = measure_size(small_spec())
    assert (size["layer"], size["weights"]) == (layer, 2 * layer + 256 + 128 + 16)
    # Keys and values of 8 dimensions in 2 layers.
    assert (size["kv"], size["largest"]) == (32, 256)
    # Adapters of rank 1 have 8 + 24, 8 + 8, 8 + 32 and 32 + 8 weights in a layer.
    assert measure_size(small_spec(lora_rank=1))["trained"] == 2 * (32 + 16 + 40 + 40)
    # A reward model has a head of 8 in place of the output layer, which is tied here.
    assert measure_size(small_spec(SCORE))["weights"] == size["weights"] + 8
    assert measure_size(small_spec(SCORE, lora_rank=1))["trained"] == 256 + 8


def test_an_invalid_config_raises():
    with pytest.raises(InputError, match="invalid config of a model: 'zebra'"):
        measure_size(ModelSpec(json.dumps({"model_type": "zebra"}), SFT, "bf16"))


SHAPE = BatchShape(sequences=2, length=32, targets=16)


def deep_spec(layers, **named):
    config = opt_config(layers, 64, 4, vocab_size=50, max_position_embeddings=64)
    return ModelSpec(json.dumps(config), SCORE, "fp32", **named)


@pytest.mark.parametrize(
    ("named", "states"),
    [
        # Inputs and outputs of both norms, queries, keys, values, the output of attention before
        # and after its heads are merged, and four times the width between the last two matrices.
        ({}, 4 + 3 + 2 + 4),
        # Only the input of the layer.
        ({"activation_checkpointing": True}, 1),
    ],
)
def test_activations_that_a_layer_keeps_for_backward(named, states):
    deep, deeper = (activation_peak(deep_spec(layers, **named), SHAPE, True) for layers in (6, 7))
    assert deeper - deep == pytest.approx(states * 4 * 64 * 64, rel=0.07)


def test_inference_keeps_no_activations():
    peak, deeper = (activation_peak(deep_spec(n), SHAPE, False) for n in (6, 7))
    assert peak == deeper < activation_peak(deep_spec(6), SHAPE, True) / 4


GROUPED = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
}


def kept_by_a_layer(dtype, dense_mask):
    shape = SHAPE._replace(dense_mask=dense_mask)
    specs = (
        ModelSpec(json.dumps(GROUPED | {"num_hidden_layers": n}), SCORE, dtype) for n in (6, 7)
    )
    first, second = (activation_peak(spec, shape, True) for spec in specs)
    return second - first


def test_without_a_dense_mask_keys_and_values_are_not_copied_to_all_heads():
    # Of 64 tokens, keys and values of 64 dimensions instead of 16, in 16 bits. SDPA also keeps its
    # output twice.
    copies = 2 * 64 * 2 * (64 - 16)
    saved = kept_by_a_layer("bf16", True) - kept_by_a_layer("bf16", False)
    assert copies <= saved <= copies + 2 * 64 * 64


@pytest.mark.parametrize(
    ("gpu_memory", "generate_tokens", "num_responses", "sequences"),
    [
        # Keys and values of two layers of 8 elements take 64 bytes for a token in bf16. An eighth
        # of the memory has those of 800 tokens: 25 sequences of 32.
        (8 * 800 * 64, None, 1000, 25),
        (8 * 800 * 64, 64, 1000, 2),
        # Batches of equal size: 13 + 13 instead of 25 + 1.
        (8 * 800 * 64, None, 52, 13),
        # A split without rows.
        (8 * 800 * 64, None, 0, 1),
        # Too little for micro_batch_tokens.
        (8 * 100 * 64, None, 1000, 4),
    ],
)
def test_the_batch_that_samples_follows_the_memory_of_a_gpu(
    gpu_memory, generate_tokens, num_responses, sequences
):
    placement = Placement(micro_batch_tokens=128, gpus_per_node=2)
    placement = replace(placement, generate_tokens=generate_tokens)
    spec = {"rule": "train_rlhf", "settings": {"max_response_length": 8}, "inputs": {}}
    job = PlannedSizes(spec, placement, None, gpu_memory)
    prompts = TokenCounts(math.nan, 0, 0, 24, [])
    shape = job.sampling(small_spec(POLICY), prompts, math.nan, num_responses)["sampled"]
    assert (shape.sequences, shape.length, shape.targets) == (sequences, 32, 8)
