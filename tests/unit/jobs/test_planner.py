"""What targets consist of, which results are made, and the placements of jobs."""

from dataclasses import asdict, replace

import pytest

from conftest import ROOT
from snakechat.jobs.data_jobs import Description
from snakechat.jobs.planner import jobs_of_target, jobs_to_run
from snakechat.jobs.rules import Rule, job_resources, used_resources
from snakechat.jobs.staleness import Jobs, with_upstream
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import SERIAL, Placement
from support.configs import load
from support.specs import jobs_of_rules

# --- targets ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jobs():
    return Jobs(load({"datasets": {"best": {"generations": "tiny", "select": "best"}}}), ROOT)


FOLDER_JOBS = [("train_sft", "tiny"), ("evaluate_sft", "tiny"), ("draw_report", "sft/tiny")]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("output/sft/tiny", FOLDER_JOBS),
        ("./output/rlhf/../sft/tiny", FOLDER_JOBS),
        ("output/sft/tiny.manifest.json", [("train_sft", "tiny")]),
        ("output/eval/rlhf/tiny/metrics.json", [("evaluate_rlhf", "tiny")]),
        ("output/tokens/sft/tiny", [("tokenize_sft", "tiny")]),
        ("output/report/rlhf/tiny/report.html", [("draw_report", "rlhf/tiny")]),
        # Rules of one folder.
        ("output/data/best", [("select_responses", "best")]),
        ("output/models/tiny", [("init_model", "tiny")]),
        # Its description names the entries that there are.
        ("output/benchmark/none/sft/tiny", [("run_benchmark", "none/sft/tiny")]),
    ],
)
def test_a_target_is_a_folder_a_result_or_a_file_of_it(jobs, target, expected):
    assert [(job.rule, job.name) for job in jobs_of_target(jobs, target)] == expected


@pytest.mark.parametrize("target", ["sft/tiny", "output/sft", "output/prompt_eval/reward/tiny", ""])
def test_another_target_is_an_error(jobs, target):
    with pytest.raises(InputError, match=f"^{target} is not a result: name one"):
        jobs_of_target(jobs, target)


def test_a_target_of_an_unknown_dataset_is_an_error(jobs):
    with pytest.raises(InputError, match="the target names 'none', which is not under datasets"):
        _ = jobs["split_dataset", "none"].description


# --- stale results ----------------------------------------------------------------------------


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """Jobs of rules a to d, which nothing has built: b and c read a, and d reads both."""
    monkeypatch.chdir(tmp_path)
    readers = {"a": "", "b": "a", "c": "a", "d": "bc"}

    def rule(name):
        inputs = {upstream: (upstream, "x") for upstream in readers[name]}
        return Rule(lambda config, job: Description({}, inputs), name, program="make")

    return jobs_of_rules(tmp_path, ["make"], {name: rule(name) for name in readers})


@pytest.mark.parametrize(
    ("missing", "stale", "made"),
    [
        ("", "", ""),
        ("abcd", "", "abcd"),
        # What nothing that is made reads stays missing.
        ("ab", "", ""),
        # c is up to date, and runs because a, which b reads, is made.
        ("abd", "", "abcd"),
        ("b", "d", "bd"),
        ("d", "c", "cd"),
    ],
)
def test_results_are_made_if_stale_or_wanted_or_read_by_those(chain, missing, stale, made):
    wanted = [chain["d", "x"]]
    jobs = with_upstream(wanted)
    for job in jobs:
        job.existed = job.rule not in missing
        job.result = None if job.rule in missing + stale else f"the result of {job.rule}"
    assert "".join(sorted(job.rule for job in jobs_to_run(jobs, wanted))) == made


# --- placements ---------------------------------------------------------------------------------

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
    jobs = Jobs(load({"sft": {"recipes": {"tiny": {"placement": asdict(placement)}}}}), ROOT)
    assert jobs["train_sft", "tiny"].placement == placement
    assert jobs["evaluate_sft", "tiny"].placement == replace(placement, **expected)


NONE = dict.fromkeys(job_resources(PLACEMENT))
STEP = {"mpi": "srun", "tasks_per_gpu": 0}


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({}, {"nodes": 1, "gpu": 8}),
        # Resources of each node.
        ({"nodes": 4}, {"nodes": 4, "gres": "gpu:8", "tasks": 4, **STEP}),
        ({"gpus_per_node": 0}, {"nodes": 1}),
        ({"gpus_per_node": 0, "nodes": 2}, {"nodes": 2, "tasks": 2, **STEP}),
    ],
)
def test_resources_of_a_job(placement, expected):
    expected = {**NONE, "mem_mb": 1000, "runtime": 60, **expected}
    assert job_resources(replace(PLACEMENT, **placement), 0) == expected


def test_memory_grows_after_a_job_ran_out_of_it_up_to_a_limit():
    limited = replace(PLACEMENT, max_mem_mb=1800)
    assert [job_resources(limited, times)["mem_mb"] for times in range(3)] == [1000, 1500, 1800]
    assert job_resources(limited, 2)["runtime"] == 60
    assert job_resources(PLACEMENT, 2)["mem_mb"] == 1000


def test_a_deployment_has_a_partition_and_a_type_of_gpus():
    slurm = {"partition": "a100", "qos": "long", "gpu_type": "a100"}
    placement = replace(PLACEMENT, slurm=slurm)
    expected = {"slurm_partition": "a100", "qos": "long", "gpu_model": "a100", "gpu": 8}
    assert expected.items() <= job_resources(placement).items()
    assert job_resources(replace(placement, nodes=2))["gres"] == "gpu:a100:8"
    # The defaults of others are Snakemake's matter.
    benchmark = {"command": "a {output}", "metrics": {"b": ["c"]}, "placement": {"slurm": slurm}}
    assert not {"qos", "gpu_model"} & {*used_resources(load())}
    assert {"qos", "gpu_model"} < {*used_resources(load({"benchmarks": {"mine": benchmark}}))}


def test_a_job_without_models_has_a_process_on_the_cpu():
    jobs = Jobs(load(), ROOT)
    assert jobs["split_dataset", "toy"].placement is SERIAL
    threads = jobs.config.recipe("sft", "tiny")["placement"]["threads"]
    assert jobs["tokenize_sft", "tiny"].placement == replace(SERIAL, threads=threads)


def test_an_evaluation_has_the_placement_of_the_recipe_of_its_model():
    recipes = {"recipes": {"tiny": {"placement": {"deployment": "cpu", "threads": 5}}}}
    jobs = Jobs(load({"sft": recipes, "reward": recipes}), ROOT)
    for job in (("prompt_eval", "sft/tiny"), ("rw_eval", "tiny")):
        assert jobs[job].placement.threads == 5
