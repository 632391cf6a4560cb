"""Memory and hours of workloads: by hand, and as they were published."""

import json
from argparse import ArgumentTypeError

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from snakechat.estimates.flops import GPUS, Gpu, parse_gpu
from snakechat.estimates.job_estimate import total_flops, total_seconds
from snakechat.estimates.memory import (
    SCORE,
    SFT,
    BatchShape,
    ModelSpec,
    Run,
    Workload,
    activation_peak,
    measure_size,
    peak_memory,
)
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import Placement
from support.families import FAMILIES
from support.specs import opt_config, opt_spec, small_spec

# --- sizes --------------------------------------------------------------------------------------


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


def test_the_error_of_an_unknown_model_does_not_list_all_others():
    with pytest.raises(InputError, match=r"^invalid config of a model: .*: nonesuch$"):
        measure_size(ModelSpec('{"model_type": "nonesuch"}', SFT, "bf16"))


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


# --- activations --------------------------------------------------------------------------------

SHAPE = BatchShape(sequences=2, length=32, targets=16)
OPT = opt_config(6, 64, 4, vocab_size=50, max_position_embeddings=64)


def peak_of(layers, **named):
    config = json.dumps(OPT | {"num_hidden_layers": layers})
    return activation_peak(ModelSpec(config, SCORE, "fp32", **named), SHAPE, True)


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
    kept = peak_of(7, **named) - peak_of(6, **named)
    assert kept == pytest.approx(states * 4 * 64 * 64, rel=0.07)


# --- a process ----------------------------------------------------------------------------------

GPU = 80 << 30


def memory_of(model, stage, placement=(), gpu_memory=GPU):
    """Return the moment and the memory of training a model, which samples, by four processes."""
    runs = [Run(model, stage, epochs=1, samples=True)]
    workload = Workload(runs, 0, 1, 1, BatchShape(1, 64, 1))
    return peak_memory(workload, Placement(gpus_per_node=4, **dict(placement)), gpu_memory)


@pytest.mark.parametrize(
    ("stage", "offload", "weights", "training_bytes"),
    [
        (0, "none", 2, 18),
        (1, "none", 2, 4 + 12 / 4),
        (2, "none", 2, 2 + 14 / 4),
        (3, "none", 0.5, 4),
        (2, "optimizer", 2, 2),
        (3, "optimizer", 0.5, 0.5),
        (3, "parameters", 0, 0),
    ],
)
def test_resident_bytes_per_weight_with_four_processes(stage, offload, weights, training_bytes):
    # Only the adapters are trained.
    model = small_spec(lora_rank=1)
    _, memory = memory_of(model, stage, placement={"offload": offload}, gpu_memory=0)
    size = measure_size(model)
    gathered = 2 * max(size["layer"], size["largest"]) if stage == 3 else 0
    assert memory["weights"] == weights * (size["weights"] - size["trained"]) + gathered
    assert memory["training"] == training_bytes * size["trained"]


def test_sampling_takes_whole_weights_and_the_tokens_of_the_placement():
    model = opt_spec("opt-1.3b")
    moment, memory = memory_of(model, 3)
    assert (moment, memory["weights"], memory["cache"]) == ("sampling", model.weight_bytes, 0)
    # Keys and values of 24 layers of 2,048 dimensions.
    _, memory = memory_of(model, 3, placement={"generate_tokens": 1000})
    assert memory["cache"] == 1000 * 2 * 2 * 24 * 2048
    # A small GPU gathers a layer at a time.
    assert memory_of(model, 3, gpu_memory=1 << 30)[0] == "training"


# --- hours by hand -------------------------------------------------------------------------------

SAMPLED = BatchShape(sequences=8, length=512, targets=256)


def work(run, rows=1, length=10):
    return Workload([run], rows, length, length, SAMPLED)


def test_flops_of_a_sequence():
    weights, attention = measure_size(small_spec())["weights"], 4 * 2 * 8 * 10
    assert total_flops(work(Run(small_spec(), 0, forwards=1))) == 10 * (2 * weights + attention)
    assert total_flops(work(Run(small_spec(), 0, epochs=1))) == 10 * (6 * weights + 3 * attention)
    recomputing = small_spec(activation_checkpointing=True)
    assert total_flops(work(Run(recomputing, 0, epochs=1))) == 10 * (8 * weights + 4 * attention)
    adapted = small_spec(lora_rank=1)
    expected = 10 * (4 * measure_size(adapted)["weights"] + 2 * 256 + 3 * attention)
    assert total_flops(work(Run(adapted, 0, epochs=1), rows=3)) == 3 * expected


@pytest.mark.parametrize(
    ("actor", "gpu", "gpus", "hours"),
    [("13b", "a100-40g", 8, 10.8), ("30b", "a100-80g", 8, 18.0)],
)
def test_rlhf_hours_are_within_25_percent_of_deepspeed_chats(actor, gpu, gpus, hours):
    # From DeepSpeed-Chat's README: step 3 on 264,292 prompts of 256 tokens with responses of 256
    # tokens, a reward model of 350m, and batches that fill the GPUs.
    rows, shape = 264_292, BatchShape(sequences=64, length=512, targets=256)
    model = opt_spec(f"opt-{actor}", activation_checkpointing=True)
    reward = opt_spec("opt-350m", SCORE)
    runs = [
        Run(model, 0, forwards=2, epochs=1, samples=True),
        Run(reward, 0, forwards=2, epochs=1),
    ]
    workload = Workload(runs, rows, 512, 512, shape, responses=rows, sampled=shape)
    assert total_seconds(workload, GPUS[gpu], gpus) / 3600 == pytest.approx(hours, rel=0.25)


def test_a_gpu_has_a_name_or_numbers():
    assert parse_gpu("h100") == GPUS["h100"]
    assert parse_gpu("48,181,864") == Gpu(48 * 10**9, 181e12, 864e9, "48,181,864")
    for text in ("h1000", "48", "48GB,181,864"):
        with pytest.raises(ArgumentTypeError, match=r"expected b200, .* 48,181,864"):
            parse_gpu(text)
