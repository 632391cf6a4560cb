"""Placements and resources of jobs."""

from dataclasses import asdict, replace

import pytest

from snakechat.jobs.rules import (
    HARDWARE,
    OF_SLURM,
    job_placement,
    job_resources,
    used_resources,
)
from snakechat.workflow.processes import SERIAL, Placement, changed_values
from support.configs import load

PLACEMENT = Placement(gpus_per_node=8, zero_stage=2, threads=64, mem_mb=1000, runtime=60)


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({}, {"nodes": 1, "gpus_per_node": 1, "threads": 8}),
        ({"gpus_per_node": 0}, {"nodes": 1, "gpus_per_node": 0, "threads": 64}),
        ({"threads": 3}, {"nodes": 1, "gpus_per_node": 1, "threads": 1}),
        # Partitioned models.
        ({"nodes": 4, "zero_stage": 3}, {}),
    ],
)
def test_an_evaluation_gets_one_gpu_and_its_threads(placement, expected):
    placement = replace(PLACEMENT, **placement)
    config = load({"sft": {"recipes": {"tiny": {"placement": asdict(placement)}}}})
    assert job_placement(config, "train_sft", "tiny") == placement
    assert job_placement(config, "evaluate_sft", "tiny") == replace(placement, **expected)


NONE = dict.fromkeys((*HARDWARE, *OF_SLURM))
STEP = {"mpi": "srun", "tasks_per_gpu": 0}


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({}, {"nodes": 1, "gpu": 8}),
        # Resources of each node.
        ({"nodes": 4}, {"nodes": 4, "gres": "gpu:8", "tasks": 4, **STEP}),
        ({"gpus_per_node": 0}, {"nodes": 1}),
    ],
)
def test_resources_of_a_job(placement, expected):
    expected = {**NONE, "mem_mb": 1000, "runtime": 60, **expected}
    assert job_resources(replace(PLACEMENT, **placement), 0) == expected


def test_memory_grows_after_a_job_ran_out_of_it_up_to_a_limit():
    placement = replace(PLACEMENT, max_mem_mb=1800)
    resources = [job_resources(placement, times) for times in (0, 1, 2)]
    found = [(each["mem_mb"], each["runtime"]) for each in resources]
    assert found == [(1000, 60), (1500, 60), (1800, 60)]
    assert job_resources(PLACEMENT, 2)["mem_mb"] == 1000


def test_a_deployment_has_a_partition_and_a_type_of_gpus():
    slurm = {"partition": "a100", "qos": "long", "gpu_type": "a100"}
    placement = replace(PLACEMENT, slurm=slurm)
    expected = {"slurm_partition": "a100", "qos": "long", "gpu_model": "a100", "gpu": 8}
    assert expected.items() <= job_resources(placement).items()
    assert job_resources(replace(placement, nodes=2))["gres"] == "gpu:a100:8"
    # Snakemake is asked for no others.
    benchmark = {"command": "a {output}", "metrics": {"b": ["c"]}, "placement": {"slurm": slurm}}
    assert "qos" not in used_resources(load())
    assert {"qos", "gpu_model"} < {*used_resources(load({"benchmarks": {"mine": benchmark}}))}


def test_a_job_without_models_has_a_process_on_the_cpu():
    config = load()
    assert job_placement(config, "split_dataset", "toy") is SERIAL
    threads = config.recipe("sft", "tiny")["placement"]["threads"]
    assert job_placement(config, "tokenize_sft", "tiny") == replace(SERIAL, threads=threads)
    assert changed_values(SERIAL) == {}
