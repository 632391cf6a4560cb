"""Workloads and estimates of jobs of config.yaml: whether they fit, and what they cost."""

import json
import math
from dataclasses import replace

import pytest

from conftest import ROOT
from snakechat.data.ragged_arrays import open_ragged
from snakechat.estimates import job_estimate
from snakechat.estimates.flops import GPUS
from snakechat.estimates.job_estimate import GIB, JobEstimate, total_flops
from snakechat.jobs.staleness import Jobs, with_upstream
from support.configs import load
from support.specs import ONE_GPU, OPT_CONFIGS

pytestmark = pytest.mark.slow

OPT_1_3B_WEIGHTS = 1_315_758_080
# A dataset whose number of rows is unknown, and a model that is not of OPT.
OTHERS = {"datasets": {"other": {"hub": "someone/something", "format": "plain"}}}
OTHERS["datasets"]["few"] = {"hub": "Dahoas/rm-static", "format": "plain", "max_rows": 1000}
OTHERS |= {"models": {"other": {"hub": "someone/model"}}}


@pytest.fixture(autouse=True)
def fresh_folder(tmp_path, monkeypatch):
    """A folder of the build, without results, and a Hub that has the configs of OPT."""
    monkeypatch.chdir(tmp_path)
    configs = {f"facebook/{name}": json.dumps(config) for name, config in OPT_CONFIGS.items()}
    monkeypatch.setattr(job_estimate, "hub_config", lambda name, _: configs[name])


def planned(rule, stage, recipe, **placement):
    """Return a job of a recipe. It and the jobs upstream have one GPU, with changes."""
    jobs = Jobs(load({stage: {"recipes": {"mine": recipe}}, **OTHERS}), ROOT)
    for job in with_upstream([jobs[rule, "mine"]]):
        job.placement = replace(ONE_GPU, **placement)
    return jobs[rule, "mine"]


def planned_sft(placement=(), **recipe):
    """Return a job of SFT, of OPT-1.3B by default."""
    recipe = {"datasets": ["rm-static"], "global_batch_size": 8, **recipe}
    return planned("train_sft", "sft", recipe, **dict(placement))


def estimate_sft(gpu="a100-80g", **options):
    return JobEstimate(planned_sft(**options), GPUS[gpu])


def estimate(rule, stage, recipe, **placement):
    """Return the estimate of a job that samples, on an H100."""
    recipe = {"datasets": ["other"], "max_prompt_length": 100, **recipe}
    return JobEstimate(planned(rule, stage, recipe, **placement), GPUS["h100"])


# --- memory -----------------------------------------------------------------------------------


def test_a_warning_says_what_does_not_fit():
    job = estimate_sft(model="opt-6.7b")
    size = f"does not fit: {sum(job.memory.values()) / GIB:,.1f} GiB at {job.moment}"
    assert job.warnings[0].startswith(size)
    assert estimate_sft(model="opt-125m", placement={"gpus_per_node": 0}).warnings == []
    assert math.isnan(estimate_sft(placement={"gpus_per_node": 0}).seconds)


def test_auto_is_the_first_rung_that_fits():
    keys = ("zero_stage", "activation_checkpointing", "micro_batch_tokens")
    placement = {"gpus_per_node": 8, **dict.fromkeys(keys, "auto")}
    assert estimate_sft(placement=placement).placement.zero_stage == 0
    large = estimate_sft(model="opt-13b", placement=placement)
    assert large.placement.zero_stage == 2 and large.warnings == []
    assert "zero_stage: 2" in large.notes[0]


@pytest.mark.parametrize(("ranks", "fits"), [(1, False), (4, True)])
def test_vllm_has_a_fraction_of_each_gpu(ranks, fits):
    recipe = {"model": "models/opt-30b", "generation_backend": "vllm"}
    placement = {"gpus_per_node": 8, "zero_stage": 3, "vllm_tensor_parallel_size": ranks}
    job = estimate("generate_responses", "generations", recipe, **placement)
    assert ("vllm needs more" in str(job.warnings)) is not fits


# --- time and disk ----------------------------------------------------------------------------


def test_flops_hours_and_disk_by_hand():
    job = estimate_sft()
    # A fifth of 76,256 rows of 256 tokens; 6 operations per weight, and attention in 24 layers.
    rows = 0.2 * 76_256
    flops = rows * 256 * (6 * OPT_1_3B_WEIGHTS + 12 * 24 * 2048 * 256)
    assert total_flops(job.workload) == pytest.approx(flops)
    assert job.seconds == pytest.approx(flops / 312e12 / 0.4)
    assert job.disk == 2 * OPT_1_3B_WEIGHTS and job.checkpoint == 12 * OPT_1_3B_WEIGHTS
    assert estimate_sft(save_dtype="fp32").disk == 4 * OPT_1_3B_WEIGHTS
    assert job.notes == [
        "assumed: rm-static has as many rows as the Hub listed in 2023 or 2024",
        "assumed until tokenize_sft mine is built: 256 tokens per row, half of the limit",
    ]
    assert "not counted: train_only trains fewer weights" in estimate_sft(train_only="norm").notes
    assert estimate_sft(placement={"generate_tokens": 10**6}).memory == job.memory
    assert total_flops(estimate_sft(datasets=["few"]).workload) == pytest.approx(flops * 200 / rows)
    # Steps of 8 rows.
    assert total_flops(estimate_sft(max_steps=10).workload) == pytest.approx(flops * 80 / rows)
    unknown = estimate_sft(datasets=["other"])
    assert math.isnan(unknown.seconds) and unknown.memory["training"] > 0
    assert unknown.notes[0] == "unknown until other is split: number of rows"


def test_existing_tokens_are_counted(tmp_path):
    job, tokens = planned_sft(), tmp_path / "output/tokens/sft/mine"
    tokens.mkdir(parents=True)
    for field, lengths in (("prompt", (10, 30)), ("chosen", (20, 60))):
        with open_ragged(tokens, f"train.{field}", 300) as write_rows:
            write_rows([[1] * length for length in lengths])
    estimated = JobEstimate(job, GPUS["h100"])
    assert total_flops(estimated.workload) == pytest.approx(
        120 * (6 * OPT_1_3B_WEIGHTS + 12 * 24 * 2048 * 60)
    )
    largest = estimated.workload.largest
    assert (largest.length, largest.sequences) == (90, 8192 // 90)
    assert estimated.notes == []
    job.inputs["tokens"].existed = True
    assert JobEstimate(job, GPUS["h100"]).notes == [
        "assumed: rows are as long as in the stale result of tokenize_sft mine"
    ]
