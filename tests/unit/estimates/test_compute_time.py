"""FLOPs and times, by hand and compared with published ones."""

from argparse import ArgumentTypeError

import pytest

from snakechat.estimates.activation_memory import SCORE, BatchShape, measure_size
from snakechat.estimates.flops import GPUS, Gpu, parse_gpu
from snakechat.estimates.job_estimate import GIB, Run, Workload, total_seconds
from support.specs import opt_spec, small_spec

SHAPE = BatchShape(sequences=8, length=512, targets=256)


def work(run, rows=1, length=10):
    return Workload([run], rows, length, length, SHAPE)


def test_flops_of_a_sequence():
    weights, attention = measure_size(small_spec()).weights, 4 * 2 * 8 * 10
    assert work(Run(small_spec(), 0, forwards=1)).flops == 10 * (2 * weights + attention)
    assert work(Run(small_spec(), 0, epochs=1)).flops == 10 * (6 * weights + 3 * attention)
    recomputing = small_spec(activation_checkpointing=True)
    assert work(Run(recomputing, 0, epochs=1)).flops == 10 * (8 * weights + 4 * attention)
    adapted = small_spec(lora_rank=1)
    expected = 10 * (4 * measure_size(adapted).weights + 2 * 256 + 3 * attention)
    assert work(Run(adapted, 0, epochs=1), rows=3).flops == 3 * expected


# Weights, and the cache of 384 tokens of each of 8 rows on average.
BYTES_READ = 2 * 12_853_473_280 + 2 * 2 * 40 * 5120 * 8 * 384


@pytest.mark.parametrize(
    ("sampling", "bandwidth", "gpus", "seconds"),
    [
        # Two batches of 8 rows on each of 2 GPUs, with 0.5 ms besides reading.
        ({"responses": 31}, 1e12, 2, 2 * 256 * (BYTES_READ / 0.5e12 + 5e-4)),
        # Two engines of 4 GPUs, each with two batches of 8 rows.
        ({"responses": 32, "vllm_ranks": 4}, 1e12, 8, 512 * (BYTES_READ / 4 / 0.5e12 + 5e-4)),
    ],
)
def test_seconds_of_sampling_responses(sampling, bandwidth, gpus, seconds):
    run = Run(opt_spec("opt-13b"), 0, samples=True)
    workload = work(run)._replace(sampled=SHAPE, **sampling)
    gpu = Gpu(memory=GIB, flops=1e15, bandwidth=bandwidth)
    assert total_seconds(workload, gpu, gpus) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("actor", "gpu", "gpus", "hours"),
    [
        ("13b", "a100-40g", 8, 10.8),
        ("30b", "a100-80g", 8, 18.0),
    ],
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
    for text in ("h1000", "48", "48GB,181,864", "0,181,864", "inf,1,1"):
        with pytest.raises(ArgumentTypeError, match=r"expected b200, .* 48,181,864"):
            parse_gpu(text)
