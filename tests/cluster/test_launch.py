"""Where jobs run: placements, the resources that are asked for, and what starts the processes."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys

import pytest
import yaml

from conftest import ROOT

CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())
DEPLOYMENTS = CONFIG["deployments"]

# --- placements -----------------------------------------------------------------------------

PLACEMENTS = {
    "named": ("single_node", DEPLOYMENTS["single_node"]),
    "changed": (
        {"deployment": "single_node", "offload": "optimizer"},
        {**DEPLOYMENTS["single_node"], "offload": "optimizer"},
    ),
    # Of a new recipe: what its stage's default says.
    "partial": ({"threads": 3}, {**DEPLOYMENTS["single_gpu"], "threads": 3}),
    "complete": (DEPLOYMENTS["multi_node"], DEPLOYMENTS["multi_node"]),
    "nothing": ({}, DEPLOYMENTS["single_gpu"]),
}
RECIPES = {
    name: {"model": "tiny", "datasets": ["toy"], "placement": stated}
    for name, (stated, _) in PLACEMENTS.items()
}


def planned(workflow, config, *targets):
    """The jobs of a dry run by rule and recipe: their resources, and what programs are told."""
    (workflow.folder / "mine.json").write_text(json.dumps(config))
    # A rule with a message shows nothing else.
    for rules in workflow.folder.glob("rules/*.smk"):
        rules.write_text(re.sub(r"    message:\n.*\n", "", rules.read_text()))
    options = ("-n", "-p", "--cores", "64", "--configfile", "mine.json")
    process = workflow.snakemake(*targets, *options)
    assert process.returncode == 0, process.stdout[-3000:]
    found = {}
    for block in process.stdout.split("\n\n"):
        command = re.search(r"Shell command: (.*--placement.*)", block)
        if command:
            words = shlex.split(command[1].partition(" 2>&1")[0])
            rule = re.search(r"^rule (\w+):", block, re.MULTILINE)[1]
            job = f"{rule} {re.search('name=(.*)', block)[1]}"
            pairs = re.search("resources: (.*)", block)[1].split(", ")
            asked = dict(pair.split("=") for pair in pairs)
            asked["threads"] = re.search(r"threads: (\d+)|$", block)[1] or "1"
            found[job] = json.loads(words[words.index("--placement") + 1]), asked
    return found


def test_a_placement_is_a_deployment_and_what_is_said_on_top(sources):
    targets = [f"output/sft/{name}" for name in RECIPES]
    jobs = planned(sources, {"sft": {"recipes": RECIPES}}, *targets)
    for name, (_, expected) in PLACEMENTS.items():
        assert jobs[f"train_sft {name}"][0] == {**expected, "save_steps": 20}, name


def test_one_deployment_can_take_the_place_of_all_placements(sources):
    config = {"deployment": "mine", "sft": {"recipes": RECIPES}}
    config["deployments"] = {"mine": {**DEPLOYMENTS["cpu"], "threads": 5}}
    targets = [f"output/sft/{name}" for name in RECIPES]
    jobs = planned(sources, config, *targets, "output/rlhf/13b")
    for name in ("train_sft named", "train_sft complete", "train_rlhf 13b", "train_reward 350m"):
        assert jobs[name][0] == {**DEPLOYMENTS["cpu"], "threads": 5, "save_steps": 20}, name


def test_a_user_changes_one_key_of_a_recipe_of_ours(sources):
    changes = {"sft": {"recipes": {"6.7b": {"placement": {"micro_batch_tokens": 2048}}}}}
    changes["rlhf"] = {"recipes": {"6.7b": {"placement": {"critic_zero_stage": 2}}}}
    jobs = planned(sources, changes, "output/rlhf/6.7b")
    node = {**DEPLOYMENTS["single_node"], "save_steps": 20}
    assert jobs["train_sft 6.7b"][0] == {**node, "micro_batch_tokens": 2048}
    assert jobs["train_rlhf 6.7b"][0] == {**node, "critic_zero_stage": 2}


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"sft": {"recipes": {"tiny": {"placement": "laptop"}}}},
            "sft.recipes.tiny.placement names 'laptop', which is not under deployments (there: cpu,"
            " multi_node, single_gpu, single_node)",
        ),
        (
            {"reward": {"defaults": {"placement": {"deployment": "laptop"}}}},
            "reward.defaults.placement names 'laptop', which is not under deployments",
        ),
        ({"deployment": "laptop"}, "deployment names 'laptop', which is not under deployments"),
        (
            {"deployments": {"mine": {"nodes": 1}}},
            "deployments.mine: 'gpus_per_node' is a required property",
        ),
        (
            {"sft": {"recipes": {"tiny": {"placement": {"thread": 1}}}}},
            "sft.recipes.tiny.placement: Additional properties are not allowed ('thread'",
        ),
        # Each alone could be.
        (
            {"sft": {"recipes": {"mine": {"placement": {"offload": "parameters"}}}}},
            "sft.recipes.mine.placement.zero_stage: 3 was expected",
        ),
    ],
)
def test_a_placement_that_cannot_be_is_told_in_one_line(config, line, sources):
    (sources.folder / "mine.json").write_text(json.dumps(config))
    process = sources.snakemake("-n", "output/sft/tiny", "--configfile", "mine.json")
    assert process.returncode == 1
    last = process.stdout.strip().splitlines()[-1]
    assert last.startswith(f"error: config: {line}"), process.stdout


# --- resources ------------------------------------------------------------------------------


def test_a_job_asks_for_what_its_placement_says(sources):
    jobs = planned(sources, {}, "output/rlhf/6.7b", "output/sft/66b", "output/sft/tiny")
    asked = {name: resources for name, (_, resources) in jobs.items()}
    node, nodes, cpu = (asked[f"train_sft {name}"] for name in ("6.7b", "66b", "tiny"))
    assert (node["nodes"], node["gpu"], node["threads"]) == ("1", "8", "64")
    assert (node["mem_mb"], node["runtime"]) == ("512000", "1440")
    # So many on each node, where the plugin would tell Slurm a sum.
    assert (nodes["nodes"], nodes["tasks"], nodes["gres"]) == ("8", "8", "gpu:8")
    assert (nodes["mpi"], nodes["tasks_per_gpu"]) == ("srun", "0")
    assert "gpu" not in nodes and not {"mpi", "gres", "tasks"} & node.keys()
    assert cpu["nodes"] == "1" and "gpu" not in cpu


def test_what_has_one_process_asks_for_one_gpu(sources):
    jobs = planned(sources, {}, "output/sft/66b", "output/sft/tiny")
    placement, asked = jobs["evaluate_sft 66b"]
    assert (placement["nodes"], placement["gpus_per_node"], placement["threads"]) == (1, 1, 8)
    assert (asked["nodes"], asked["gpu"], asked["threads"]) == ("1", "1", "8")
    assert jobs["evaluate_sft tiny"][0] == {**DEPLOYMENTS["cpu"], "save_steps": 20}


def test_memory_and_time_grow_with_each_attempt(sources):
    for attempt, (memory, minutes) in {1: (4000, 60), 2: (6000, 90)}.items():
        sources.options = ("--attempt", str(attempt))
        _, asked = planned(sources, {}, "output/sft/tiny")["train_sft tiny"]
        assert (asked["mem_mb"], asked["runtime"]) == (str(memory), str(minutes))


# --- the launcher ---------------------------------------------------------------------------

PROGRAM = """
import json
import os
import sys

names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
told = {name: os.environ[name] for name in names if name in os.environ}
told["waits"] = [os.environ[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")]
# One write: several processes have the same output.
os.write(1, json.dumps({**told, "pid": os.getpid(), "arguments": sys.argv[1:]}).encode() + b"\\n")
sys.stdin.read()
"""
OWN = ("RANK", "WORLD_SIZE", "SLURM_JOB_ID", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
OWN += ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.fixture
def start(tmp_path):
    """A function that starts a program by a placement; all are killed at the end."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    started = []

    def begin(nodes=1, gpus=0, threads=8, **environment):
        placement = json.dumps({"nodes": nodes, "gpus_per_node": gpus, "threads": threads})
        inherited = {name: value for name, value in os.environ.items() if name not in OWN}
        process = subprocess.Popen(
            [sys.executable, ROOT / "scripts/launch.py", program, "--placement", placement],
            env={**inherited, "TMPDIR": str(tmp_path), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def said_by(process, number=1):
    """What so many processes of a job tell of themselves, in their order."""
    lines = [json.loads(process.stdout.readline()) for _ in range(number)]
    return sorted(lines, key=lambda line: line.get("RANK", ""))


def error_of(process):
    """The line that a job fails with."""
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    [line] = said.splitlines()
    return line


def test_one_process_is_plain_python(start):
    # An operator tells one node, too, that it is the first of one.
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    process = start(OMP_NUM_THREADS="3", **group)
    [told] = said_by(process)
    assert told.pop("pid") == process.pid
    assert told.pop("arguments")[0] == "--placement"
    assert told == {"OMP_NUM_THREADS": "3", "waits": ["PASSIVE", "10000"]}


def test_how_long_threads_spin_can_be_told(start):
    assert [told["waits"] for told in said_by(start(GOMP_SPINCOUNT="0"))] == [["PASSIVE", "0"]]


def test_a_node_has_a_process_for_each_gpu_and_they_share_its_threads(start):
    process = start(gpus=2, threads=6, CUDA_VISIBLE_DEVICES="3,5,7")
    for rank, told in enumerate(said_by(process, 2)):
        assert (told["RANK"], told["LOCAL_RANK"], told["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert (told["CUDA_VISIBLE_DEVICES"], told["OMP_NUM_THREADS"]) == ("3,5", "3")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM


def test_jobs_beside_each_other_have_different_gpus(start):
    both = {"CUDA_VISIBLE_DEVICES": "0,1"}
    first, second = start(gpus=1, **both), start(gpus=1, **both)
    [[one], [other]] = [said_by(process) for process in (first, second)]
    assert {one["CUDA_VISIBLE_DEVICES"], other["CUDA_VISIBLE_DEVICES"]} == {"0", "1"}
    assert error_of(start(gpus=1, **both)) == (
        "error: 0 of 2 GPUs are free and this job needs 1: tell Snakemake how many there are, by"
        " --resources gpu=2"
    )
    # However a job ends.
    first.kill()
    first.wait()
    assert error_of(start(gpus=2, **both)).startswith("error: 1 of 2 GPUs are free and this job")
    [again] = said_by(start(gpus=1, **both))
    assert again["CUDA_VISIBLE_DEVICES"] == one["CUDA_VISIBLE_DEVICES"]


def test_a_slurm_job_has_the_gpus_that_it_was_given(start):
    said_by(start(gpus=1, CUDA_VISIBLE_DEVICES="0"))
    # Slurm calls the first of each job 0.
    [told] = said_by(start(gpus=1, CUDA_VISIBLE_DEVICES="0", SLURM_JOB_ID="7"))
    assert told["CUDA_VISIBLE_DEVICES"] == "0"
    # An interactive one with several, in which Snakemake runs.
    several = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_ID": "8"}
    taken = [said_by(start(gpus=1, **several))[0]["CUDA_VISIBLE_DEVICES"] for _ in range(2)]
    assert taken == ["0", "1"]


def test_where_there_are_too_few_gpus_the_program_says_so(start):
    [told] = said_by(start(gpus=1, CUDA_VISIBLE_DEVICES=""))
    assert told["CUDA_VISIBLE_DEVICES"] == ""


def test_several_nodes_need_a_cluster(start):
    assert error_of(start(nodes=2)) == (
        "error: placement asks for 2 nodes and this is one: run it with --profile slurm, or on"
        " Kubernetes by scripts/kubernetes_job.py"
    )


@pytest.mark.parametrize("gpus", [0, 4])
def test_on_slurm_several_nodes_are_a_step_of_the_job(gpus, start, tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$@"; echo $PET_MASTER_ADDR $PET_MASTER_PORT\n')
    srun.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    with socket.socket() as taken:
        # The port that the job's number stands for: another has it.
        taken.bind(("", 21234))
        process = start(nodes=2, gpus=gpus, threads=6, PATH=path, SLURM_JOB_ID="51234")
        said, _ = process.communicate(timeout=60)
    step, head = said.splitlines()
    assert head == f"{socket.gethostname()} 21235"
    words = step.split()
    options = {word for word in words if word.startswith("--") and word != "--placement"}
    expected = {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=6"}
    expected |= {"--kill-on-bad-exit=1"} | ({f"--gres=gpu:{gpus}"} if gpus else set())
    assert options == expected
    assert f"{sys.executable} {ROOT / 'scripts/launch.py'} {tmp_path / 'program.py'}" in step


@pytest.mark.parametrize(
    "names",
    [
        # Of torchrun, as TrainJob and PyTorchJob set them; of PyTorchJob alone; of a step of Slurm.
        ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
        ("RANK", "MASTER_ADDR", "MASTER_PORT"),
        ("SLURM_NODEID", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    ],
)
def test_nodes_that_something_else_starts_find_together(names, start):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    nodes = []
    for number in ("0", "1"):
        group = dict(zip(names, (number, "127.0.0.1", port), strict=True))
        nodes.append(start(nodes=2, PET_NPROC_PER_NODE="auto", **group))
    told = [said_by(node)[0] for node in nodes]
    assert [(one["RANK"], one["WORLD_SIZE"]) for one in told] == [("0", "2"), ("1", "2")]
    assert {one["OMP_NUM_THREADS"] for one in told} == {"8"}


def test_a_job_of_another_number_of_nodes_is_refused(start):
    assert error_of(start(nodes=1, PET_NNODES="2")) == (
        "error: placement asks for 1 nodes and PET_NNODES is 2: make them one"
    )
