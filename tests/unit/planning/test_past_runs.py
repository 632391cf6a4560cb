"""Earlier runs beside their estimates, from the files of results."""

import json

import pytest

from snakechat.planning.compute_time import GPUS, parse_gpu
from snakechat.planning.past_runs import PastRun, correction_factors, past_runs
from snakechat.workflow.digests import digest
from support.specs import EMPTY_RUN

CONFIG = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 32}
RUN = {"seconds": 100.0, "gpu": "NVIDIA H100 80GB HBM3", "peak_gpu_memory_mb": 70}
PLACEMENT = {"nodes": 1, "gpus_per_node": 1, "zero_stage": 0, "offload": "none"}
PLACEMENT |= {"activation_checkpointing": False, "micro_batch_tokens": 64, "mem_mb": 4000}
SETTINGS = {"max_length": 32, "epochs": 1, "dtype": "bf16", "lora_rank": 0, "train_base": "none"}
SETTINGS |= {"max_steps": None, "global_batch_size": 8, "datasets": [["a", 1]]}


def write(output, rule, folder, run, settings=(), **inputs):
    """Write the manifest and the run record of a result; return its path."""
    path = output / folder
    entries = {key: {"rule": key, "name": "a", "path": str(path)} for key, path in inputs.items()}
    spec = {"rule": rule, "name": "a", "path": str(path), "settings": dict(settings)}
    spec |= {"inputs": entries, "files": {}, "code": {}, "requirements": {}}
    manifest = {"spec": spec, "inputs": {}, "lineage": {}, "facts": {}, "files": {}}
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps(manifest))
    path.with_name("a.manifest.json").symlink_to("a/manifest.json")
    record = {**EMPTY_RUN, "spec": digest(spec), "placement": PLACEMENT, **run}
    (path / "run.json").write_text(json.dumps(record))
    return path


@pytest.fixture
def output(tmp_path):
    """Return a function that writes the results of an SFT model with a run record."""

    def make(**changes):
        cpu = {"seconds": 1.0}
        model = write(tmp_path, "fetch_model", "models/a", cpu, {"hub": "someone/model"})
        (model / "config.json").write_text(json.dumps(CONFIG | {"n_positions": 64}))
        data = {"hub": "Dahoas/rm-static"}
        records = write(tmp_path, "import_dataset", "data/a", cpu, data)
        split = {"weights": {"sft": 2, "reward": 4, "rlhf": 4}, "max_rows": None}
        rows = write(tmp_path, "split_dataset", "split/a", cpu, split, records=records)
        inputs = {"records.a": records, "rows.a": rows}
        tokens = write(tmp_path, "tokenize_sft", "tokens/sft/a", cpu, SETTINGS, **inputs)
        run = {**RUN, **changes}
        write(tmp_path, "train_sft", "sft/a", run, SETTINGS, model=model, tokens=tokens)
        return tmp_path

    return make


def test_a_run_on_this_kind_of_gpu_is_compared_with_its_estimate(output):
    [run] = past_runs(output(), GPUS["h100"])
    assert (run.rule, run.job, run.seconds, run.peak) == ("train_sft", "train_sft a", 100, 70 << 20)
    assert 0 < run.estimated_seconds < 100 and run.estimated_peak > 0
    assert correction_factors([run]) == {"train_sft": 100 / run.estimated_seconds}


@pytest.mark.parametrize("gpu", [GPUS["a100-80g"], parse_gpu("80GB,989TFLOPS,3.35TB/s")])
def test_runs_on_other_gpus_do_not_count(gpu, output):
    assert past_runs(output(), gpu) == []


def test_a_resumed_run_does_not_count(output):
    # Its record has the time since it was resumed.
    assert past_runs(output(resumed_after_step=20), GPUS["h100"]) == []


def test_a_run_of_another_spec_does_not_count(output):
    assert past_runs(output(spec="0" * 64), GPUS["h100"]) == []


def test_a_run_without_its_upstream_results_does_not_count(output):
    folder = output()
    (folder / "data/a.manifest.json").unlink()
    assert past_runs(folder, GPUS["h100"]) == []


def test_the_factor_is_the_median_of_a_rule():
    runs = [PastRun("a", "", seconds, 100, 0, 0) for seconds in (90, 110, 500)]
    assert correction_factors([*runs, PastRun("b", "", 50, 100, 0, 0)]) == {"a": 1.1, "b": 0.5}
