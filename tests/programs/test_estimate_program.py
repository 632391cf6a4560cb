"""The program estimate.py: what it prints about a plan."""

import json
from types import SimpleNamespace

import pytest
import yaml

from conftest import ROOT
from estimate import correct, summary
from snakechat.planning.memory import GIB


def job(seconds, disk, checkpoint_bytes, num_gpus=8, stale=True):
    """Return an estimate, as far as the summary reads it."""
    workload = SimpleNamespace(checkpoint_bytes=lambda: checkpoint_bytes)
    return SimpleNamespace(
        seconds=seconds, disk=disk, num_gpus=num_gpus, stale=stale, workload=workload
    )


def test_the_summary_adds_hours_and_disk_of_stale_jobs():
    # Three checkpoints of the largest job exist at a time.
    jobs = [job(3600, GIB, GIB), job(1800, 2 * GIB, 2 * GIB), job(9e9, 9e12, 9e12, stale=False)]
    assert summary(jobs) == (
        "2 of 3 jobs are stale: 12.0 GPU hours, 3.0 GiB of disk for results of known size, and up"
        " to 6.0 GiB for the checkpoints of a training job"
    )


def test_past_runs_correct_the_hours_of_jobs_of_the_same_rule():
    jobs = [SimpleNamespace(spec={"rule": rule}, seconds=60, notes=[]) for rule in ("a", "b")]
    jobs.append(SimpleNamespace(spec={"rule": "a"}, seconds=None, notes=[]))
    correct(jobs, {"a": 1.5})
    assert [job.seconds for job in jobs] == [90, 60, None]
    assert [job.notes for job in jobs] == [["hours x 1.50, as earlier runs of a"], [], []]


def estimate(workflow, *arguments):
    """Return the output of estimate.py."""
    process = workflow.run("python", "scripts/estimate.py", *arguments)
    assert process.returncode == 0, process.stdout
    return process.stdout


def test_a_plan_of_a_fresh_tree(sources):
    jobs = json.loads(estimate(sources, "output/rlhf/13b", "--json"))
    by_name = {job["job"]: job for job in jobs}
    assert all(job["stale"] for job in jobs)
    for name in ("train_sft 13b", "train_rlhf 13b"):
        assert by_name[name]["gpus"] == 8
        assert by_name[name]["seconds"] > 0
        # The placement of these recipes leaves the stage open.
        choice = "zero_stage: 0 without activation_checkpointing, micro_batch_tokens: "
        assert by_name[name]["notes"][0].startswith(choice)
    # Evaluations have one process, which samples batches as large as the memory allows.
    evaluation = by_name["evaluate_rlhf 13b"]
    assert (evaluation["gpus"], evaluation["moment"]) == (1, "sampling")
    assert evaluation["memory"]["cache"] > 3 * GIB
    assert by_name["draw_report rlhf/13b"]["memory"] is None
    assert not (sources.folder / "output/models").exists()


@pytest.mark.exhaustive
def test_the_shipped_recipes_fit_on_gpus_with_80_gb(sources):
    config = yaml.safe_load((ROOT / "config.yaml").read_text())
    names = [name for name in config["rlhf"]["recipes"] if not name.startswith("tiny")]
    targets = ["output/dpo/llama2-7b", *(f"output/rlhf/{name}" for name in names)]
    jobs = json.loads(estimate(sources, *targets, "--gpu", "a100-80g", "--json"))
    on_gpus = {job["job"]: job for job in jobs if job["gpus"]}
    for stage in ("sft", "rlhf"):
        assert on_gpus[f"train_{stage} 66b"]["gpus"] == on_gpus[f"evaluate_{stage} 66b"]["gpus"]
    assert on_gpus.keys() >= {"evaluate_dpo llama2-7b", "compute_reference llama2-7b"}
    assert {name: job["warnings"] for name, job in on_gpus.items() if job["warnings"]} == {}


def test_a_plan_of_a_finished_build(quick):
    heading, _, *lines, last = estimate(quick, "output/rlhf/tiny", *quick.options).splitlines()
    assert heading.startswith("a100-80g: 80 GiB, 312 TFLOPS")
    assert all(" up to date " in line for line in lines)
    assert last.startswith(f"0 of {len(lines)} jobs are stale: 0.0 GPU hours, 0.0 MiB of disk")
    [training] = [line for line in lines if line.startswith("train_sft tiny")]
    manifest = json.loads((quick.folder / "output/sft/tiny.manifest.json").read_text())
    size = sum(facts["size"] for facts in manifest["files"].values())
    assert f"{size / 2**20:.1f} MiB" in training
