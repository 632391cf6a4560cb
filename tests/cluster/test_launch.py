"""Placements of jobs, the resources that they request, and the launcher of their processes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from conftest import ROOT
from launch import claim_gpus, describe_kill, this_node
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import READING, STATES


def test_a_job_requests_the_resources_of_its_placement_unless_options_change_them(sources):
    # For a rule with a message, Snakemake prints nothing else.
    for rules in sources.folder.glob("rules/*.smk"):
        rules.write_text(re.sub(r"    message:\n.*\n", "", rules.read_text()))
    targets = ("output/sft/66b", "output/sft/tiny", "output/reward/tiny")
    options = ("--set-threads", "train_reward=1", "--set-resources", "train_reward:mem_mb=99")
    process = sources.snakemake(*targets, "-n", "-p", "--cores", "64", *options)
    assert process.returncode == 0, process.stdout[-3000:]
    blocks = re.findall("^rule train_.*?\n\n", process.stdout, re.MULTILINE | re.DOTALL)
    nodes, cpu, changed = (
        next(block for block in blocks if re.search(pattern, block, re.DOTALL))
        for pattern in ("train_sft:.*name=66b", "train_sft:.*name=tiny", "train_reward:")
    )
    # Per node; from `gpu`, the plugin would request the total of all nodes.
    for resource in ("nodes=8", "tasks=8", "gres=gpu:8", "mpi=srun", "tasks_per_gpu=0"):
        assert f" {resource}" in nodes
    assert "nodes=1" in cpu and not re.search("gpu=|mpi=|gres=|tasks=", cpu)
    # On a CPU, the threads of a job decide about the last digits.
    assert "mem_mb=99" in changed and "threads: " not in changed and '"threads"' not in changed


# --- the launcher ---------------------------------------------------------------------------

PROGRAM = """
import json, os, sys

# One write, because several processes print to the same output.
os.write(1, json.dumps({**os.environ, "pid": os.getpid()}).encode() + b"\\n")
sys.stdin.read()
"""
CHANGED = ("RANK", "WORLD_SIZE", "SLURM_JOB_ID", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
CHANGED += ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.fixture
def start(tmp_path):
    """A function that launches a program with a placement; all are killed at the end."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    started = []

    def begin(nodes=1, gpus=0, threads=8, of_placement=None, **environment):
        placement = {"nodes": nodes, "gpus_per_node": gpus, "threads": threads}
        placement = json.dumps(placement | {"environment": of_placement or {}})
        inherited = {name: value for name, value in os.environ.items() if name not in CHANGED}
        words = ["--placement", placement]
        process = subprocess.Popen(
            [sys.executable, ROOT / "scripts/launch.py", program, *words],
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


def variables_of(process, number=1):
    """Return the environment variables that the processes of a job print, by rank."""
    lines = [json.loads(process.stdout.readline()) for _ in range(number)]
    return sorted(lines, key=lambda line: line.get("RANK", ""))


def error_of(process):
    """Return the error line of a job that fails."""
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    [line] = stderr.splitlines()
    return line


def test_one_process_is_plain_python(start):
    # Snakemake sets OMP_NUM_THREADS to at most --cores, and an operator sets the variables of a
    # group for a single node too.
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    # Variables of the shell that change results are removed, variables of the placement recorded.
    removed = {"MKL_CBWR": "COMPATIBLE", "OMP_DYNAMIC": "true", "PYTHONOPTIMIZE": "1"}
    removed |= {"GLIBC_TUNABLES": "glibc.malloc.check=1"}
    shell = {"ATEN_CPU_CAPABILITY": "default", "PYTHONUTF8": "0", "MKL_DYNAMIC": "TRUE"}
    # A command has another home, and finds the cache and the token of the Hub there.
    shell |= {"HF_HOME": "", "XDG_CACHE_HOME": "/cache", "OMP_NUM_THREADS": "3"}
    placed = {"ATEN_CPU_CAPABILITY": "avx2"}
    [variables] = variables_of(start(of_placement=placed, **group, **removed, **shell))
    assert not variables.keys() & {*group, *removed, "LOCAL_RANK", "PYTORCH_ALLOC_CONF"}
    expected = {**placed, "PYTHONUTF8": "1", "MKL_DYNAMIC": "FALSE", "OMP_WAIT_POLICY": "PASSIVE"}
    expected |= {"HF_HOME": "/cache/huggingface", "GOMP_SPINCOUNT": "10000"}
    # As many threads as the placement has, whatever cores a machine has.
    expected |= {"OMP_NUM_THREADS": "8"}
    assert {name: variables[name] for name in expected} == expected


def test_a_killed_process_is_named_with_the_file_that_it_read(start, tmp_path, monkeypatch):
    process = start()
    [variables] = variables_of(process)
    os.kill(variables["pid"], signal.SIGSEGV)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGSEGV
    assert stderr == "error: program.py was ended by SIGSEGV\n"
    (tmp_path / READING).write_text("data/b.parquet")
    monkeypatch.setenv(STATES, str(tmp_path))
    line = describe_kill("program.py", signal.SIGSEGV)
    assert line.startswith("data/b.parquet: SIGSEGV ended the process that reads: ")


def test_a_node_has_one_process_per_gpu_and_divides_its_threads(start):
    process = start(gpus=2, threads=6, CUDA_VISIBLE_DEVICES="3,5,7")
    for rank, variables in enumerate(variables_of(process, 2)):
        assert variables["RANK"] == variables["LOCAL_RANK"] == str(rank)
        assert variables["WORLD_SIZE"] == "2"
        assert variables["CUDA_VISIBLE_DEVICES"] == "3,5"
        assert variables["OMP_NUM_THREADS"] == "3"
        assert variables["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM


def test_concurrent_jobs_have_different_gpus(start):
    both = {"CUDA_VISIBLE_DEVICES": "0,1"}
    # A user can set how the memory of GPUs is allocated.
    own = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    first, second = start(gpus=1, of_placement=own, **both), start(gpus=1, **both)
    [[one], [other]] = [variables_of(process) for process in (first, second)]
    assert one["PYTORCH_ALLOC_CONF"] == own["PYTORCH_ALLOC_CONF"]
    assert {one["CUDA_VISIBLE_DEVICES"], other["CUDA_VISIBLE_DEVICES"]} == {"0", "1"}
    # A killed job releases its GPU.
    first.kill()
    first.wait()
    assert error_of(start(gpus=2, **both)) == (
        "error: 1 of 2 GPUs are free and this job needs 2: start Snakemake with --resources gpu=2,"
        " so that it counts them"
    )
    [again] = variables_of(start(gpus=1, **both))
    assert again["CUDA_VISIBLE_DEVICES"] == one["CUDA_VISIBLE_DEVICES"]


# Too few: the program reports that. Slurm assigns a job its GPUs; the first one is number 0 in
# each. Two of our jobs may run in one interactive job of Slurm.
CLAIMS = [("", None, ["", ""]), ("0", "7", ["0", "0"]), ("0,1", "8", ["0", "1"])]


@pytest.mark.parametrize(("visible", "slurm_job", "claimed"), CLAIMS)
def test_which_gpus_a_job_claims(visible, slurm_job, claimed, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if slurm_job:
        monkeypatch.setenv("SLURM_JOB_ID", slurm_job)
    for expected in claimed:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        claim_gpus(1)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    if slurm_job == "8":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(InputError, match="0 of 2 GPUs are free"):
            claim_gpus(1)


def test_several_nodes_need_a_cluster(start):
    assert error_of(start(nodes=2)) == (
        "error: the placement has 2 nodes and this is one: run it with --profile slurm, or on"
        " Kubernetes with scripts/kubernetes_job.py"
    )


def test_on_slurm_the_nodes_are_a_step_of_the_job(start, tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$@"\necho $PET_MASTER_ADDR $PET_MASTER_PORT $NCCL_X\n')
    srun.chmod(0o755)
    slurm = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "51234"}
    with socket.socket() as other:
        # Another program uses the first port that the launcher tries for this job.
        other.bind(("", 21234))
        stdout, _ = start(nodes=2, gpus=4, threads=6, **slurm).communicate(timeout=60)
    step, address = stdout.splitlines()
    assert address == f"{socket.gethostname()} 21235"
    options = {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=6"}
    options |= {"--kill-on-bad-exit=1", "--gres=gpu:4", "--placement"}
    assert {word for word in step.split() if word.startswith("--")} == options
    assert f"{sys.executable} {ROOT / 'scripts/launch.py'} {tmp_path / 'program.py'}" in step
    # The placement sets variables of the network.
    network = {"MASTER_ADDR": "10.1.0.1", "NCCL_X": "ib0"}
    stdout, _ = start(nodes=2, of_placement=network, **slurm).communicate(timeout=60)
    assert re.search(r"^10\.1\.0\.1 \d+ ib0$", stdout, re.MULTILINE)


# torchrun's variables, which a PyTorchJob sets; its older ones; Slurm's.
NAMES = ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
OTHER_NAMES = (("RANK", "MASTER_ADDR", "MASTER_PORT"), ("SLURM_NODEID", *NAMES[1:]))


@pytest.mark.parametrize("names", [NAMES, *OTHER_NAMES])
def test_a_cluster_names_a_node_in_several_ways(names, monkeypatch):
    for name in {*NAMES, *OTHER_NAMES[0], *OTHER_NAMES[1]}:
        monkeypatch.delenv(name, raising=False)
    assert this_node() == {}
    for name, value in zip(names, ("1", "10.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert [*this_node().values()] == ["1", "10.0.0.1", "29500"]
