"""Estimated memory and disk, by hand."""

import json
from dataclasses import replace

import pytest

from snakechat.planning.activation_memory import POLICY, SCORE, BatchShape, ModelSpec, measure_size
from snakechat.planning.hub_catalog import MODEL_CONFIGS
from snakechat.planning.memory import (
    TrainedModel,
    checkpoint_bytes,
    generation_memory,
    host_memory,
    inference_host_memory,
    inference_memory,
    model_folder_bytes,
    resident_memory,
    training_memory,
    vllm_memory,
    weight_bytes,
)
from snakechat.training.zero_stages import DEFAULT_BUFFERS, samples_whole
from snakechat.workflow.placement import placement_of
from support.specs import small_spec


def placement(**changes):
    return placement_of({"gpus_per_node": 4, **changes})


@pytest.mark.parametrize(
    ("stage", "dtype", "weights", "gradients", "optimizer", "buffers"),
    [
        (0, "bf16", 2, 4, 12, 0),
        (0, "fp32", 4, 4, 8, 0),
        (1, "fp32", 4, 4, 3, 0),
        # Stage 1 runs as stage 2 in bf16.
        (1, "bf16", 2, 1, 3, 0),
        (2, "bf16", 2, 1, 3, 0),
        (3, "bf16", 0.5, 1, 3, 4 * 100),
    ],
)
def test_resident_bytes_per_weight_with_four_processes(
    stage, dtype, weights, gradients, optimizer, buffers
):
    model = small_spec(dtype=dtype)
    small = DEFAULT_BUFFERS._replace(bucket=100)
    memory = resident_memory(TrainedModel(model, stage), placement(), small)
    size = measure_size(model)
    assert memory["weights"] == weights * size.weights
    assert memory["gradients"] == gradients * size.trained
    assert memory["optimizer"] == optimizer * size.trained
    assert memory.get("buffers", 0) == buffers


def test_only_adapters_have_gradients_and_optimizer_states():
    model = small_spec(lora_rank=1)
    memory = resident_memory(TrainedModel(model, 0), placement(gpus_per_node=1))
    assert memory["gradients"] == 4 * 256
    assert memory["optimizer"] == 12 * 256
    assert memory["weights"] == 2 * measure_size(model).weights


def test_offloaded_tensors_are_in_host_memory():
    model, weights = small_spec(), measure_size(small_spec()).weights
    optimizer, parameters = (placement(offload=value) for value in ("optimizer", "parameters"))
    assert resident_memory(TrainedModel(model, 2), optimizer)["weights"] == 2 * weights
    for offloading in (optimizer, parameters):
        memory = resident_memory(TrainedModel(model, 3), offloading)
        assert memory["optimizer"] == memory["gradients"] == 0
    assert resident_memory(TrainedModel(model, 3), parameters)["weights"] == 0
    # Each process loads the model; offloaded are 16 bytes per weight over all processes.
    loaded = 4 * 2 * weights
    assert host_memory([TrainedModel(model, 2)], [], placement()) == loaded
    assert host_memory([TrainedModel(model, 2)], [], optimizer) == loaded + 16 * weights
    # With ZeRO 3, a process reads a quarter of the largest weight at a time.
    loaded = 4 * 2 * measure_size(model).largest / 4
    assert host_memory([TrainedModel(model, 3)], [], parameters) == loaded + 18 * weights


@pytest.mark.parametrize("nodes", [1, 8])
def test_opt_66b_fits_on_gpus_of_80_gb(nodes):
    """No process holds the whole model while it loads, trains, samples or saves."""
    model = ModelSpec(json.dumps(MODEL_CONFIGS["facebook/opt-66b"]), POLICY, "bf16", lora_rank=128)
    eight = placement(nodes=nodes, gpus_per_node=8, zero_stage=3)
    batch, sampled = BatchShape(1, 512, 256), BatchShape(8, 512, 256)
    entry, memory_of_gpu = TrainedModel(model, 3), 80 << 30
    _, memory = training_memory([entry], [model], eight, batch, sampled, False, memory_of_gpu)
    # The partitions of the model and of its reference, and what is gathered at a time.
    partition = 2 * measure_size(model).weights / (8 * nodes)
    assert (
        2 * partition < memory["weights"] < 2 * partition + 0.08 * 2 * measure_size(model).weights
    )
    assert sum(memory.values()) < 0.9 * memory_of_gpu
    assert host_memory([entry], [model], eight) < 2 << 30
    # Evaluations; a reward model scores in fp32.
    for evaluated, generation in (
        (model._replace(lora_rank=0), sampled),
        (model._replace(lora_rank=0, loss=SCORE, dtype="fp32"), None),
    ):
        _, memory = inference_memory([evaluated], eight, batch, generation, memory_of_gpu)
        assert memory["weights"] > weight_bytes(evaluated) / (8 * nodes)
        assert sum(memory.values()) < 0.9 * memory_of_gpu
        assert inference_host_memory([evaluated], eight) < 4 << 30


def test_evaluations_offload_parameters():
    model, offloading = small_spec(), placement(zero_stage=3, offload="parameters")
    batch = BatchShape(1, 64, 1)
    memory = [
        inference_memory([model], replace(offloading, offload=offload), batch)[1]["weights"]
        for offload in ("none", "parameters")
    ]
    assert memory[0] - memory[1] == weight_bytes(model) / 4
    assert inference_host_memory([model], offloading) > weight_bytes(model)


def test_an_evaluation_in_one_process_has_the_whole_model():
    model = ModelSpec(json.dumps(MODEL_CONFIGS["facebook/opt-13b"]), POLICY, "bf16")
    alone = placement(gpus_per_node=1, zero_stage=3)
    _, memory = inference_memory([model], alone, BatchShape(1, 64, 1))
    assert memory["weights"] == weight_bytes(model)


def test_a_small_model_in_16_bits_is_compared_in_fp32():
    model, alone = small_spec(), placement(gpus_per_node=1)
    moment, memory = inference_memory([model], alone, BatchShape(1, 64, 1))
    assert moment == "comparison"
    # The weights of 2 bytes, and a copy of 4 bytes.
    assert memory["weights"] == 6 * measure_size(model).weights
    # A model in fp32 has no copy.
    model = small_spec(dtype="fp32")
    _, memory = inference_memory([model], alone, BatchShape(1, 64, 1))
    assert memory["weights"] == 4 * measure_size(model).weights


def test_a_model_is_gathered_to_sample_if_it_takes_a_third_of_a_gpu_at_most():
    model = ModelSpec(json.dumps(MODEL_CONFIGS["facebook/opt-13b"]), POLICY, "bf16")
    whole = 2 * measure_size(model).weights
    assert samples_whole(whole, 80 << 30)
    assert not samples_whole(whole, 40 << 30)
    arguments = [TrainedModel(model, 3)], [], placement(zero_stage=3), BatchShape(1, 64, 1)
    weights = [
        training_memory(*arguments, BatchShape(64, 512, 256), False, memory << 30)[1]["weights"]
        for memory in (80, 40)
    ]
    assert weights[0] == pytest.approx(whole + whole / 4)
    assert weights[1] < 0.5 * whole


def test_vllm_takes_its_fraction_of_a_gpu_only_while_it_generates():
    model = ModelSpec(json.dumps(MODEL_CONFIGS["facebook/opt-13b"]), POLICY, "bf16")
    whole, gpu = weight_bytes(model), 80 << 30
    assert vllm_memory(model, gpu, 4) == {"weights": whole / 4, "cache": 0.3 * gpu - whole / 4}
    arguments = [TrainedModel(model, 3)], [], placement(gpus_per_node=4, zero_stage=3)
    batches = BatchShape(1, 64, 1), BatchShape(64, 512, 256), False, gpu
    moment, memory = training_memory(*arguments, *batches, vllm_ranks=4)
    assert moment == "sampling"
    # A quarter of the trained model, and a quarter of vLLM's copy.
    assert memory["weights"] == whole / 2
    assert memory["cache"] == 0.3 * gpu - whole / 4
    # A large micro-batch needs more than vLLM, which sleeps.
    batches = BatchShape(64, 1024, 1), BatchShape(64, 512, 256), False, gpu
    moment, memory = training_memory(*arguments, *batches, vllm_ranks=4)
    assert (moment, memory["cache"]) == ("backward", 0)
    moment, memory = inference_memory([model], arguments[2], *batches[:2], gpu, vllm_ranks=4)
    assert moment == "sampling"


def test_generation_holds_keys_and_values():
    model = ModelSpec(json.dumps(MODEL_CONFIGS["facebook/opt-13b"]), POLICY, "bf16")
    memory = generation_memory(model, BatchShape(sequences=8, length=512, targets=256))
    # Keys and values of 5120 dimensions in 40 layers, for 4096 tokens, and again for the prompts,
    # which are half of the tokens.
    assert memory["cache"] == 2 * 40 * 5120 * 2 * 4096 * 1.5


def test_a_saved_model_has_the_dtype_of_training():
    adapted = small_spec(lora_rank=1)
    # Merged weights, and adapters of 256 elements.
    assert model_folder_bytes(adapted) == 2 * measure_size(small_spec()).weights + 2 * 256
    assert model_folder_bytes(small_spec(dtype="fp32")) == 4 * measure_size(small_spec()).weights
    assert checkpoint_bytes([TrainedModel(adapted, 3)]) == 12 * 256
