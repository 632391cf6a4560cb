"""Estimates of whole jobs: whether they fit, and what they cost."""

import json
import math
from dataclasses import replace

import pytest

from snakechat.data.ragged_arrays import RaggedWriter
from snakechat.planning.activation_memory import measure_size
from snakechat.planning.compute_time import GPUS
from snakechat.planning.job_estimate import JobEstimate
from snakechat.planning.memory import GIB
from snakechat.planning.plan import Plan, PlannedJob
from support.specs import ONE_GPU

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("opt_hub")]

SETTINGS = {"max_length": 512, "epochs": 1, "dtype": "bf16", "lora_rank": 0, "train_base": "none"}
SETTINGS |= {"max_steps": None, "global_batch_size": 8}
DATA = {"hub": "Dahoas/rm-static"}
SPLIT = {"weights": {"sft": 2, "reward": 4, "rlhf": 4}, "max_rows": None}
OPT_1_3B_WEIGHTS = 1_315_758_080


def plan_sft(
    model="facebook/opt-1.3b", data=DATA, settings=(), stale=True, folder="out", **placement
):
    """Return the Plan of an SFT recipe and the path of its training."""
    specs = {}

    def add(rule, settings, **inputs):
        entries = {
            key: {"rule": specs[path]["rule"], "name": specs[path]["name"], "path": path}
            for key, path in inputs.items()
        }
        path = f"{folder}/{rule}"
        specs[path] = {"rule": rule, "name": "a", "path": path, "settings": settings}
        specs[path]["inputs"] = entries
        return path

    base = add("fetch_model", {"hub": model, "revision": "main"})
    records = add("import_dataset", data)
    rows = add("split_dataset", SPLIT, records=records)
    settings = SETTINGS | dict(settings)
    blend = settings | {"datasets": [["a", 1]]}
    inputs = {"records.a": records, "rows.a": rows}
    tokens = add("tokenize_sft", blend, tokenizer=base, **inputs)
    path = add("train_sft", blend, model=base, tokens=tokens)
    jobs = {name: PlannedJob(spec, replace(ONE_GPU, **placement)) for name, spec in specs.items()}
    return Plan(jobs, set(jobs) if stale else set()), path


def estimate_sft(gpu="a100-80g", **options):
    plan, path = plan_sft(**options)
    return JobEstimate(path, plan, GPUS[gpu])


# --- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "suggestions"),
    [
        ({"gpu": "v100-32g"}, ["micro_batch_tokens: 4096", "activation_checkpointing: true"]),
        ({"model": "facebook/opt-6.7b"}, ["zero_stage: 2, offload: optimizer", "lora_rank: 128"]),
        ({"model": "facebook/opt-13b", "gpus_per_node": 8}, ["zero_stage: 3"]),
    ],
)
def test_a_warning_suggests_settings_with_which_the_job_fits(options, suggestions):
    job = estimate_sft(**options)
    needed, _, suggested = job.warnings[0].partition("; fits with ")
    size = f"does not fit: {sum(job.memory.values()) / GIB:,.1f} GiB at {job.moment}"
    assert needed.startswith(size)
    assert set(suggestions) <= set(suggested.split(" | "))


def test_cpu_memory_of_a_node_is_estimated():
    job = estimate_sft(model="facebook/opt-13b", gpus_per_node=8, zero_stage=2)
    # Eight processes load 12.85 B weights of two bytes.
    [warning] = [text for text in job.warnings if "CPU memory" in text]
    assert warning == "needs 191.5 GiB of CPU memory on each node, mem_mb is 64000"
    assert estimate_sft(settings={"lora_rank": 128}).host_memory < 3 * GIB


def test_a_job_on_a_cpu_is_limited_by_mem_mb_and_has_no_hours():
    job = estimate_sft(model="facebook/opt-125m", gpus_per_node=0, mem_mb=3000)
    assert "mem_mb has 2.9 GiB" in job.warnings[0]
    assert job.num_gpus == 0 and math.isnan(job.seconds)
    assert estimate_sft(model="facebook/opt-125m", gpus_per_node=0).warnings == []


# --- time and disk ----------------------------------------------------------------------------


def test_flops_hours_and_disk_by_hand():
    job = estimate_sft()
    # A fifth of 76,256 rows of 256 tokens; 6 operations per weight, and attention in 24 layers.
    tokens = 0.2 * 76_256 * 256
    flops = tokens * (6 * OPT_1_3B_WEIGHTS + 12 * 24 * 2048 * 256)
    assert job.workload.flops == pytest.approx(flops)
    assert job.seconds == pytest.approx(flops / 312e12 / 0.4)
    assert job.disk == 2 * OPT_1_3B_WEIGHTS
    assert job.notes == [
        "assumed: a has as many rows as the Hub listed in 2024",
        "assumed until tokenize_sft a is built: 256 tokens per row, half of the limit",
    ]


def test_max_steps_limits_the_work():
    whole, short = estimate_sft(), estimate_sft(settings={"max_steps": 10})
    # Steps of 8 rows, of a fifth of 76,256 rows.
    assert short.workload.flops == pytest.approx(whole.workload.flops * 80 / (0.2 * 76_256))


def test_with_an_unknown_number_of_rows_only_memory_is_estimated():
    plan, path = plan_sft(data={"hub": "someone/something"})
    job = JobEstimate(path, plan, GPUS["h100"])
    assert math.isnan(job.seconds)
    assert job.memory["weights"] > 0
    # The size of the download is known.
    assert JobEstimate("out/fetch_model", plan, GPUS["h100"]).disk == 2 * OPT_1_3B_WEIGHTS
    assert job.notes[0] == "unknown until a is split: number of rows"


def test_existing_tokens_are_counted(tmp_path):
    plan, path = plan_sft(folder=tmp_path)
    tokens = tmp_path / "tokenize_sft"
    tokens.mkdir()
    for field, lengths in (("prompt", (10, 30)), ("chosen", (20, 60))):
        with RaggedWriter(tokens, f"train.{field}", 300) as writer:
            writer.write([[1] * length for length in lengths])
    job = JobEstimate(path, plan._replace(stale={path}), GPUS["h100"])
    assert job.workload.flops == pytest.approx(120 * (6 * OPT_1_3B_WEIGHTS + 12 * 24 * 2048 * 60))
    largest = job.workload.largest
    assert (largest.length, largest.sequences) == (90, 8192 // 90)
    assert job.notes == []
    stale_tokens = JobEstimate(path, plan, GPUS["h100"])
    assert stale_tokens.notes == [
        "assumed: rows are as long as in the stale result of tokenize_sft a"
    ]


def test_the_config_of_an_existing_model_is_read(tmp_path):
    (tmp_path / "fetch_model").mkdir()
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 32}
    (tmp_path / "fetch_model/config.json").write_text(json.dumps(config | {"n_positions": 16}))
    [trained] = estimate_sft(model="someone/model", folder=tmp_path).workload.trained
    assert measure_size(trained.model).weights == 2144


def test_a_model_of_an_object_store_has_no_estimate_before_it_is_fetched():
    plan, path = plan_sft()
    plan.jobs["out/fetch_model"].spec["settings"] = {}
    job = JobEstimate(path, plan, GPUS["h100"])
    [warning] = job.warnings
    assert "is not known before its download: build out/fetch_model" in warning
    assert job.memory == {}
