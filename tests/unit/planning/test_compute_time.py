"""FLOPs and times, by hand and compared with published ones."""

import json

import pytest

from snakechat.planning import compute_time
from snakechat.planning.activation_memory import POLICY, SCORE, BatchShape, ModelSpec, measure_size
from snakechat.planning.compute_time import GPUS, Gpu, parse_gpu
from snakechat.planning.hub_catalog import MODEL_CONFIGS
from snakechat.planning.memory import GIB
from support.specs import small_spec


def test_flops_of_a_token():
    weights, attention = measure_size(small_spec()).weights, 4 * 2 * 8 * 10
    assert compute_time.inference_flops(small_spec(), 100, 10) == 100 * (2 * weights + attention)
    assert compute_time.training_flops(small_spec(), 100, 10) == 100 * (6 * weights + 3 * attention)
    recomputing = small_spec(activation_checkpointing=True)
    expected = 100 * (8 * weights + 4 * attention)
    assert compute_time.training_flops(recomputing, 100, 10) == expected
    adapted = small_spec(lora_rank=1)
    expected = 100 * (4 * measure_size(adapted).weights + 2 * 256 + 3 * attention)
    assert compute_time.training_flops(adapted, 100, 10) == expected


def test_seconds_of_flops():
    gpu = Gpu(memory=GIB, flops=1e12, bandwidth=1e9)
    expected = 4 / compute_time.FLOPS_UTILIZATION
    assert compute_time.compute_seconds(8e12, gpu, 2) == pytest.approx(expected)
    assert compute_time.compute_seconds(8e12, gpu, 2, 0.5) == pytest.approx(8)


def test_generating_a_token_reads_all_weights():
    model = ModelSpec(json.dumps(MODEL_CONFIGS["facebook/opt-13b"]), POLICY, "bf16")
    gpu = Gpu(memory=GIB, flops=1e15, bandwidth=1e12)
    shape = BatchShape(sequences=8, length=512, targets=256)
    # Two batches of 8 rows on each of 2 GPUs; the cache has 384 tokens of each row on average.
    bytes_read = 2 * 12_853_473_280 + 2 * 2 * 40 * 5120 * 8 * 384
    seconds = bytes_read / 1e12 / compute_time.BANDWIDTH_UTILIZATION
    for rows in (32, 31):
        estimate = compute_time.generation_seconds(model, rows, shape, gpu, 2)
        assert estimate == pytest.approx(2 * 256 * (seconds + 5e-4))
        estimate = compute_time.generation_seconds(model, rows, shape, gpu, 2, is_captured=False)
        assert estimate == pytest.approx(2 * 256 * seconds)


def test_launching_kernels_bounds_the_time_of_a_token():
    model = ModelSpec(json.dumps(MODEL_CONFIGS["facebook/opt-13b"]), POLICY, "bf16")
    # Reading memory takes no time. Without a graph, each of 40 layers takes 1 ms.
    gpu = Gpu(memory=GIB, flops=1e15, bandwidth=1e18)
    shape = BatchShape(sequences=8, length=512, targets=256)
    for is_captured, seconds in ((True, 5e-4), (False, 0.04)):
        estimate = compute_time.generation_seconds(model, 16, shape, gpu, 2, is_captured)
        assert estimate == pytest.approx(256 * seconds, rel=1e-3)


def test_gpus_that_divide_a_model_read_a_share_of_it():
    model = ModelSpec(json.dumps(MODEL_CONFIGS["facebook/opt-13b"]), POLICY, "bf16")
    gpu = Gpu(memory=GIB, flops=1e15, bandwidth=1e12)
    shape = BatchShape(sequences=8, length=512, targets=256)
    # Two engines of 4 GPUs, each with two batches of 8 rows.
    bytes_read = (2 * 12_853_473_280 + 2 * 2 * 40 * 5120 * 8 * 384) / 4
    seconds = 2 * 256 * (bytes_read / 1e12 / compute_time.BANDWIDTH_UTILIZATION + 5e-4)
    estimate = compute_time.generation_seconds(model, 32, shape, gpu, 8, num_ranks=4)
    assert estimate == pytest.approx(seconds)


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
def test_rlhf_hours_are_within_25_percent_of_deepspeed_chats(actor, gpu, gpus, hours):
    # From DeepSpeed-Chat's README: step 3 on 264,292 prompts of 256 tokens with responses of 256
    # tokens, a reward model of 350m, and batches that fill the GPUs. Python launches its kernels.
    rows, shape = 264_292, BatchShape(sequences=64, length=512, targets=256)
    config = json.dumps(MODEL_CONFIGS[f"facebook/opt-{actor}"])
    model = ModelSpec(config, POLICY, "bf16", activation_checkpointing=True)
    reward = ModelSpec(json.dumps(MODEL_CONFIGS["facebook/opt-350m"]), SCORE, "bf16")
    flops = rows * (
        2 * compute_time.inference_flops(model, 512, 512)
        + 2 * compute_time.inference_flops(reward, 512, 512)
        + compute_time.training_flops(model, 512, 512)
        + compute_time.training_flops(reward, 512, 512)
    )
    seconds = compute_time.compute_seconds(flops, GPUS[gpu], gpus)
    seconds += compute_time.generation_seconds(model, rows, shape, GPUS[gpu], gpus, False)
    assert seconds / 3600 == pytest.approx(hours, rel=0.25)


@pytest.mark.parametrize(
    ("text", "gpu"),
    [
        ("h100", GPUS["h100"]),
        ("48GB,181TFLOPS,864GB/s", Gpu(48 * 10**9, 181e12, 864e9)),
        ("1.5 TB/s, 80GiB, 312 TFLOPS", Gpu(80 << 30, 312e12, 1.5e12)),
    ],
)
def test_a_gpu_has_a_name_or_numbers(text, gpu):
    assert parse_gpu(text) == gpu


@pytest.mark.parametrize(
    "text", ["h1000", "48GB", "48GB,181TFLOPS", "48,181,864", "0GB,1TFLOPS,1GB/s", "1GB,1GB,1TB/s"]
)
def test_a_gpu_that_is_not_described(text):
    with pytest.raises(ValueError, match=r"expected rtx4090, .* 48GB,181TFLOPS,864GB/s"):
        parse_gpu(text)
