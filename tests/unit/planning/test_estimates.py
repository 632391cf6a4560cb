"""What a job is estimated to take, by hand and beside what programs take."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conftest import ROOT
from snakechat.planning import estimates as estimate
from snakechat.planning.estimates import GIB, GPUS, Gpu, Trained, Zero, held
from snakechat.planning.footprint import (
    POLICY,
    SCORE,
    SFT,
    Layout,
    Model,
    asked_bytes,
    size_of,
    trained_bytes,
)
from snakechat.planning.known_models import MODELS
from snakechat.planning.workload import workload_of
from snakechat.workflow.errors import InputError
from support import peaks
from support.families import FAMILIES

# A model of 12 * 8^2 * 2 weights in its layers' matrices.
SMALL = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 8,
    "n_head": 2,
    "n_positions": 16,
    "vocab_size": 32,
}


def small(loss=SFT, dtype="bf16", **named):
    return Model(json.dumps(SMALL), loss, dtype, **named)


def placement(**changes):
    return {"nodes": 1, "gpus_per_node": 4, "offload": "none"} | changes


# --- models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_few_layers_tell_those_of_all(family):
    layers = "n_layer" if family in ("gpt2", "bloom") else "num_hidden_layers"
    keys = FAMILIES[family] | {"num_hidden_layers": 5}
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys))
    expected = sum(weight.numel() for weight in whole.parameters())
    written = {layers if key == "num_hidden_layers" else key: v for key, v in keys.items()}
    found = size_of(Model(json.dumps(written), SFT, "bf16"))
    assert (found.weights, found.trained, found.layers) == (expected, expected, 5)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        # As safetensors files on the hub count them.
        ("facebook/opt-125m", 125_239_296),
        ("facebook/opt-350m", 331_196_416),
        ("facebook/opt-1.3b", 1_315_758_080),
        ("facebook/opt-6.7b", 6_658_473_984),
        ("meta-llama/Llama-2-7b-hf", 6_738_415_616),
        ("bigscience/bloom-1b1", 1_065_314_304),
    ],
)
def test_known_models_have_the_weights_that_the_hub_counts(name, weights):
    assert size_of(Model(json.dumps(MODELS[name]), SFT, "bf16")).weights == weights


def test_sizes_by_hand():
    # A layer: matrices 12 * 64, their biases 9 * 8, two norms 2 * 16. Around: words 32 * 8, places
    # 16 * 8, a norm 16.
    layer = 768 + 72 + 32
    found = size_of(small())
    assert (found.layer, found.weights) == (layer, 2 * layer + 256 + 128 + 16)
    # Keys and values of 8 units in 2 layers.
    assert (found.kv, found.vocabulary, found.largest) == (32, 32, 256)
    # Adapters of rank 1 are 8 + 24, 8 + 8, 8 + 32 and 32 + 8 in a layer.
    assert size_of(small(lora_rank=1)).trained == 2 * (32 + 16 + 40 + 40)
    # A reward model has a head of 8 in the place of the output layer, which is tied here.
    assert size_of(small(SCORE)).weights == found.weights + 8
    assert size_of(small(SCORE, lora_rank=1)).trained == 256 + 8


def test_a_config_that_makes_no_model_is_told():
    with pytest.raises(InputError, match="no config of a model: 'zebra'"):
        size_of(Model(json.dumps({"model_type": "zebra"}), SFT, "bf16"))


# --- activations ----------------------------------------------------------------------------


def opt(layers, width=64, **named):
    keys = {"num_hidden_layers": layers, "hidden_size": width, "word_embed_proj_dim": width}
    config = {"model_type": "opt", "vocab_size": 50, "num_attention_heads": 4, "ffn_dim": 4 * width}
    config |= {"max_position_embeddings": 64} | keys
    return Model(json.dumps(config), SCORE, "fp32", **named)


@pytest.mark.parametrize(
    ("named", "units"),
    [
        # Both norms' inputs and outputs, queries, keys, values, what attention gives, before and
        # behind its heads are put together, and four times the width between the two last matrices.
        ({}, 4 + 3 + 2 + 4),
        # What goes into a layer alone.
        ({"checkpointing": True}, 1),
    ],
)
def test_what_a_layer_keeps_for_its_backward_pass(named, units):
    layout = Layout(lines=2, length=32, learnt=16)
    deep, deeper = (trained_bytes(opt(layers, **named), layout)[0] for layers in (6, 7))
    assert deeper - deep == pytest.approx(units * 4 * 64 * 64, rel=0.07)


def test_without_gradients_nothing_is_kept():
    layout = Layout(lines=2, length=32, learnt=16)
    assert asked_bytes(opt(6), layout) == asked_bytes(opt(7), layout)
    assert asked_bytes(opt(6), layout) < trained_bytes(opt(6), layout)[0] / 4


def test_a_gpu_has_a_whole_chunk_of_logits_in_fp32():
    model = small(POLICY)._replace(config=json.dumps(SMALL | {"vocab_size": 1 << 15}))
    # 1024 tokens are the most that a chunk has of so many words: 2^25 logits, on a CPU 2^21 of
    # them in fp32.
    layout = Layout(lines=64, length=16, learnt=16)
    more = asked_bytes(model, layout) - asked_bytes(model, layout._replace(gpu=False))
    assert more == pytest.approx(4 * (2**25 - 2**21), rel=1e-3)


# --- memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "dtype", "weights", "gradients", "optimizer", "buffers"),
    [
        (0, "bf16", 2, 4, 12, 0),
        (0, "fp32", 4, 4, 8, 0),
        (1, "fp32", 4, 4, 3, 0),
        # In bf16 stage 1 runs as 2.
        (1, "bf16", 2, 1, 3, 0),
        (2, "bf16", 2, 1, 3, 0),
        (3, "bf16", 0.5, 1, 3, 4 * 1000),
    ],
)
def test_bytes_a_weight_of_four_processes(stage, dtype, weights, gradients, optimizer, buffers):
    model = small(dtype=dtype)
    found, count = held(Trained(model, stage), placement(), Zero(bucket=1000)), size_of(model)
    assert found["weights"] == weights * count.weights
    assert found["gradients"] == gradients * count.trained
    assert found["optimizer"] == optimizer * count.trained
    assert found.get("buffers", 0) == buffers


def test_adapters_alone_have_gradients_and_an_optimizer():
    model = small(lora_rank=1)
    found = held(Trained(model, 0), placement(gpus_per_node=1))
    assert found["gradients"] == 4 * 256
    assert found["optimizer"] == 12 * 256
    assert found["weights"] == 2 * size_of(model).weights


def test_what_is_offloaded_is_in_the_memory_of_the_node():
    model, count = small(), size_of(small()).weights
    optimizer, parameters = (placement(offload=what) for what in ("optimizer", "parameters"))
    assert held(Trained(model, 2), optimizer)["weights"] == 2 * count
    for where in (optimizer, parameters):
        found = held(Trained(model, 3), where)
        assert found["optimizer"] == found["gradients"] == 0
    assert held(Trained(model, 3), parameters)["weights"] == 0
    # 16 bytes a weight in all processes together; and each has loaded the model once.
    loaded = 4 * 2 * count
    assert estimate.host_memory([Trained(model, 2)], [], placement()) == loaded
    assert estimate.host_memory([Trained(model, 2)], [], optimizer) == loaded + 16 * count
    assert estimate.host_memory([Trained(model, 3)], [], parameters) == loaded + 18 * count


def test_zero_3_has_all_models_whole_as_they_are_loaded():
    big = Model(json.dumps(MODELS["facebook/opt-66b"]), SFT, "bf16", lora_rank=128)
    moment, parts = estimate.memory(
        [Trained(big, 3)], [], placement(nodes=16), Layout(1, 512, 511), None, False
    )
    assert moment in ("loading", "saving")
    assert parts["weights"] == pytest.approx(2 * size_of(big).weights, rel=0.02)


def test_keys_and_values_of_a_pass_that_samples():
    model = Model(json.dumps(MODELS["facebook/opt-13b"]), POLICY, "bf16")
    found = estimate.sampling(model, Layout(lines=8, length=512, learnt=256))
    # 40 layers of keys and values of 5120 units, for 4096 tokens; and half a layer more.
    assert found["cache"] == 2 * 40 * 5120 * 2 * 4096 * (1 + 1 / 80)


# --- operations and time --------------------------------------------------------------------


def test_operations_of_a_token():
    count, attention = size_of(small()).weights, 4 * 2 * 8 * 10
    assert estimate.scored_flops(small(), 100, 10) == 100 * (2 * count + attention)
    assert estimate.trained_flops(small(), 100, 10) == 100 * (6 * count + 3 * attention)
    anew = estimate.trained_flops(small(checkpointing=True), 100, 10)
    assert anew == 100 * (8 * count + 4 * attention)
    adapters = size_of(small(lora_rank=1)).weights
    found = estimate.trained_flops(small(lora_rank=1), 100, 10)
    assert found == 100 * (4 * adapters + 2 * 256 + 3 * attention)


def test_seconds_of_operations():
    gpu = Gpu(memory=GIB, flops=1e12, bandwidth=1e9)
    assert estimate.seconds_of(8e12, gpu, 2) == pytest.approx(4 / estimate.FLOPS_REACHED)


def test_a_token_takes_as_long_as_all_weights_are_read():
    model = Model(json.dumps(MODELS["facebook/opt-13b"]), POLICY, "bf16")
    gpu = Gpu(memory=GIB, flops=1e15, bandwidth=1e12)
    layout = Layout(lines=8, length=512, learnt=256)
    # Of 8 rows on each of 2 GPUs, twice; 384 tokens of each row are there in the mean.
    read = 2 * 12_853_473_280 + 2 * 2 * 40 * 5120 * 8 * 384
    seconds = 2 * 256 * read / 1e12 / estimate.BANDWIDTH_REACHED
    assert estimate.sampling_seconds(model, 32, layout, gpu, 2) == pytest.approx(seconds)
    assert estimate.sampling_seconds(model, 31, layout, gpu, 2) == pytest.approx(seconds)
    # On a GPU that reads in no time, layers take theirs.
    fast = gpu._replace(bandwidth=1e18)
    starts = 2 * 256 * 40 * estimate.SECONDS_A_LAYER
    assert estimate.sampling_seconds(model, 32, layout, fast, 2) == pytest.approx(starts)


@pytest.mark.parametrize(
    ("actor", "gpu", "gpus", "hours"),
    [
        ("1.3b", "a100-80g", 1, 11.7),
        ("1.3b", "a100-80g", 8, 1.4),
        ("6.7b", "a100-80g", 8, 4.1),
        ("13b", "a100-80g", 8, 9.0),
        ("13b", "a100-40g", 8, 10.8),
        ("30b", "a100-80g", 8, 18.0),
    ],
)
def test_hours_are_within_a_quarter_of_those_that_deepspeed_chat_published(actor, gpu, gpus, hours):
    # Step 3 on 264,292 prompts of 256 tokens with responses of 256, a reward model of 350m, batches
    # that fill the GPUs: DeepSpeed-Chat's README, its own figures.
    rows, layout = 264_292, Layout(lines=64, length=512, learnt=256)
    model = Model(json.dumps(MODELS[f"facebook/opt-{actor}"]), POLICY, "bf16", checkpointing=True)
    reward = Model(json.dumps(MODELS["facebook/opt-350m"]), SCORE, "bf16")
    flops = rows * (
        2 * estimate.scored_flops(model, 512, 512)
        + 2 * estimate.scored_flops(reward, 512, 512)
        + estimate.trained_flops(model, 512, 512)
        + estimate.trained_flops(reward, 512, 512)
    )
    seconds = estimate.seconds_of(flops, GPUS[gpu], gpus)
    seconds += estimate.sampling_seconds(model, rows, layout, GPUS[gpu], gpus)
    assert seconds / 3600 == pytest.approx(hours, rel=0.25)


def test_a_folder_with_merged_adapters_has_its_layers_in_fp32():
    found = estimate.saved_bytes(small(lora_rank=1))
    count = size_of(small(lora_rank=1))
    assert found == 2 * (count.weights - 2 * count.layer) + 4 * 2 * count.layer
    assert estimate.saved_bytes(small(dtype="fp32")) == 4 * size_of(small()).weights
    assert estimate.state_bytes([Trained(small(lora_rank=1), 3)]) == 12 * 256


# --- beside what is measured ----------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Bytes at the peak of the first process in each case, and the folder of models and tokens."""
    found = {}
    for processes in peaks.CASES:
        folder = tmp_path_factory.mktemp("peaks")
        command = ["scripts/launch.py", "--standalone", f"--nproc-per-node={processes}"]
        # Weights that other threads load would be missed.
        alone = {"HF_DEACTIVATE_ASYNC_LOAD": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.run(
            [sys.executable, *command, "tests/support/peaks.py", str(folder)],
            cwd=ROOT,
            env={**os.environ, **alone},
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr[-5000:]
        peak = json.loads((folder / "0.json").read_text())
        found |= {(processes, name): (bytes_, folder) for name, bytes_ in peak.items()}
    return found


@pytest.mark.parametrize(
    ("processes", "name"),
    [(processes, name) for processes, cases in peaks.CASES.items() for name in cases],
)
def test_memory_is_within_15_percent_of_what_is_measured(processes, name, measured):
    peak, folder = measured[processes, name]
    spec, where = peaks.training(peaks.CASES[processes][name], processes, folder)
    work = workload_of(spec, where, peaks.plan_of(folder))
    _, parts = work.memory(where, peaks.ZERO)
    estimated = sum(parts.values())
    print(f"\n{processes} {name}: {estimated / 1e6:.1f} MB, measured {peak / 1e6:.1f}", end=" ")
    assert estimated == pytest.approx(peak, rel=0.15)
