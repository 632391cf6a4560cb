"""A build on a real Slurm cluster, and jobs that fail, are cancelled, preempted or requeued.

make test-slurm. Needs root and Debian's packages slurm-wlm and munge.
"""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import ROOT, Workflow, copy_sources
from launch import free_port
from support import background_builds
from support.cluster import CONF, SLURM_CONF, Cluster, wait_until
from support.tutorials import follow

pytestmark = pytest.mark.slurm

# Seconds after which a training or a command counts as hanging.
LIMIT = 240
# Jobs are short. The GPUs of these nodes are fake: trainings request them and run on the CPU.
SHORT_WAITS = ("--latency-wait", "10", "--slurm-init-seconds-before-status-checks", "14")
OPTIONS = [
    *("--profile", "slurm", *SHORT_WAITS),
    # Last, because tests append a config file.
    *(
        "--configfile",
        str(ROOT / "tests/configs/quick.yaml"),
        str(ROOT / "tests/configs/slurm.yaml"),
    ),
]
SLOW = "output/sft/slow.manifest.json"
GPUS = ["--set-resources", "train_sft:gpu=2", "train_reward:gpu=2", "train_rlhf:gpu=1"]
# Slurm sends signals to the processes of a job, which a fork is not.
started = functools.partial(background_builds.started, python=sys.executable)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster of two nodes with two GPUs each."""
    if os.getuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))):
        pytest.skip("needs root and the packages slurm-wlm and munge")
    if CONF.exists() and not CONF.read_text().startswith(SLURM_CONF[:20]):
        pytest.skip(f"{CONF} belongs to another Slurm")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def built(workflow, *arguments):
    """Build targets; return the output of Snakemake."""
    with started(workflow, *arguments) as build:
        status, output = build.end()
    assert status == 0, output[-5000:]
    return output


def clone(folder):
    """Copy the sources, with a link to the profile."""
    copy_sources(folder)
    shutil.rmtree(folder / "slurm")
    (folder / "slurm").symlink_to("profiles/slurm")


@pytest.fixture(scope="module")
def prepared(cluster, tmp_path_factory):
    """A copy of the sources whose tokens were built on the cluster."""
    folder = tmp_path_factory.mktemp("checkout")
    clone(folder)
    workflow = Workflow(folder, *OPTIONS)
    tokens = [f"output/tokens/{stage}/tiny.manifest.json" for stage in ("sft", "reward", "rlhf")]
    tokens.append("output/tokens/sft/slow.manifest.json")
    built(workflow, *tokens)
    return workflow


def trainings(cluster):
    """Return the jobs so far that trained the slow recipe, oldest first."""
    comment = "rule_train_sft_wildcards_slow"
    return [job for job in cluster.jobs() if job.get("Comment") == comment]


def with_settings(workflow, **settings):
    """Return the workflow with other settings of the slow recipe."""
    path = workflow.folder / "changed.json"
    path.write_text(json.dumps({"sft": {"recipes": {"slow": settings}}}))
    return Workflow(workflow.folder, *workflow.options, str(path))


@pytest.fixture
def slow_tree(prepared):
    """The prepared workflow without the results of the slow recipe."""
    output = prepared.folder / "output"
    for folder in ("store/train_sft", "versions/sft/slow"):
        shutil.rmtree(output / folder, ignore_errors=True)
    for link in output.glob("sft/slow*"):
        link.unlink()
    return prepared


def saved_step(workflow):
    """Return the last step that the training saved, or 0."""
    parts = workflow.folder.glob("output/store/train_sft/.*/state/*/0-of-*")
    return max((int(part.parent.name) for part in parts), default=0)


def wait_for_steps(workflow, build):
    """Wait until the training has saved more than 20 steps; return the last one."""
    wait_until(lambda: saved_step(workflow) > 20 or build.process.poll() is not None, LIMIT / 2)
    assert build.process.poll() is None, build.log.read_text()[-5000:]
    return saved_step(workflow)


def resumed_after(workflow):
    """Return the step after which the last run of the training resumed."""
    record = workflow.folder / "output/sft/slow/run.json"
    return json.loads(record.read_text())["resumed_after_step"]


def log_of(job, output):
    """Return the log of a job that the output of a failed build names."""
    [log] = set(re.findall(rf"\S+/slurm_logs/\S+/{job}\.log", output))
    return Path(log)


# --- a build --------------------------------------------------------------------------------


def test_the_tiny_recipe_is_built_from_data_to_report(prepared, cluster):
    built(prepared, "output/rlhf/tiny", *GPUS)
    assert (prepared.folder / "output/rlhf/tiny/model.safetensors").exists()
    assert (prepared.folder / "output/report/rlhf/tiny.manifest.json").exists()
    local = Workflow(prepared.folder, *OPTIONS[-3:])
    assert local.planned("output/rlhf/tiny") == set()
    jobs = [job for job in cluster.jobs() if "Comment" in job]
    jobs = {job["Comment"].split("_wildcards")[0]: job for job in jobs}
    # Trainings alone request GPUs, and pages are built without jobs.
    requested = {rule: job.get("TresPerJob") for rule, job in jobs.items()}
    training = {"rule_train_sft": "gres:gpu:2", "rule_train_reward": "gres:gpu:2"}
    training["rule_train_rlhf"] = "gres:gpu:1"
    assert {rule: gpus for rule, gpus in requested.items() if gpus} == training
    data = ("import_dataset", "split_dataset", "init_model", "tokenize_sft", "tokenize_rlhf")
    assert requested.keys() > training.keys() | {f"rule_{rule}" for rule in data}
    assert not {"rule_draw_report", "rule_report", "rule_rlhf"} & jobs.keys()
    # SFT and reward model are trained at the same time on different nodes.
    first, second = jobs["rule_train_sft"], jobs["rule_train_reward"]
    assert {first["BatchHost"], second["BatchHost"]} == {"n1", "n2"}
    assert max(first["StartTime"], second["StartTime"]) < min(first["EndTime"], second["EndTime"])


def test_a_command_runs_as_a_job(prepared, cluster):
    shutil.copytree(ROOT / "programs", prepared.folder / "programs")
    recipe = {"model": "tiny", "datasets": ["toy"], "max_length": 96}
    recipe["command"] = "bash programs/copy_model.sh {model} {output}"
    recipe |= {"files": ["programs/copy_model.sh"], "placement": {"deployment": "cpu"}}
    path = prepared.folder / "commands.json"
    path.write_text(json.dumps({"sft": {"recipes": {"copied": recipe}}}))
    workflow = Workflow(prepared.folder, *prepared.options, str(path))
    built(workflow, "output/sft/copied.manifest.json", "--set-resources", "train_sft:gpu=1")
    assert (prepared.folder / "output/sft/copied/model.safetensors").exists()
    comment = "rule_train_sft_wildcards_copied"
    [job] = [job for job in cluster.jobs() if job.get("Comment") == comment]
    assert (job["JobState"], job["TresPerJob"]) == ("COMPLETED", "gres:gpu:1")
    log = prepared.folder / ".snakemake/slurm_logs/rule_train_sft/copied" / f"{job['JobId']}.log"
    assert f"copied {prepared.folder}/output/store/init_model/" in log.read_text()


def test_two_nodes_build_the_same_result_as_two_local_processes(slow_tree, cluster, tmp_path):
    gpus = ("--set-resources", "train_sft:gres=gpu:1")
    built(with_settings(slow_tree, epochs=1, placement={"nodes": 2}), SLOW, *gpus)
    job = trainings(cluster)[-1]
    assert (job["NumNodes"], job["NodeList"]) == ("2", "n[1-2]")
    assert job["TresPerNode"] == "gres:gpu:1"
    copy = slow_tree.copy(tmp_path / "here")
    here, spec = copy.folder, tmp_path / "spec.json"
    spec.write_text(json.dumps(copy.spec_of("output/sft/slow")))
    manifest = (here / "output/sft/slow/manifest.json").resolve(strict=True)
    on_slurm = manifest.read_text()
    record = json.loads((manifest.parent / "run.json").read_text())
    shutil.rmtree(manifest.parent)
    placement = ("--placement", json.dumps(record["placement"]))
    group = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port(23456))}
    nodes = [Workflow(here), Workflow(here)]
    for number, node in enumerate(nodes):
        node.environment = {"OMP_NUM_THREADS": "2", "PET_NODE_RANK": str(number), **group}
    words = ("python", "scripts/launch.py", "scripts/train_sft.py", "--spec", spec, *placement)
    with ThreadPoolExecutor() as pool:
        output = [process.stdout for process in pool.map(lambda node: node.run(*words), nodes)]
    assert manifest.exists(), output
    assert manifest.read_text() == on_slurm


def test_the_tutorial(cluster, tmp_path):
    clone(tmp_path)

    def run(workflow, command):
        """Run a command as in a shell on the login node."""
        waits = " ".join(SHORT_WAITS) if "--profile slurm" in command else ""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", f"{command} {waits}"],
            cwd=workflow.folder,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * LIMIT,
        )

    follow("tutorials/slurm", Workflow(tmp_path), run)
    comment = "rule_train_sft_wildcards_mine-two-nodes"
    [training] = [job for job in cluster.jobs() if job.get("Comment") == comment]
    assert training["NumNodes"] == "2"


# --- failures ----------------------------------------------------------------------


def test_a_failed_job_reports_its_error_and_its_log(slow_tree, cluster):
    with started(with_settings(slow_tree, learning_rate=1e30), SLOW, "--retries", "0") as build:
        status, output = build.end()
    assert status == 1
    assert "loss is nan, training has diverged" in output
    log = log_of(trainings(cluster)[-1]["JobId"], output)
    assert "loss is nan, training has diverged" in log.read_text()


def test_a_job_that_reaches_its_time_limit_resumes_with_the_same_resources(slow_tree, cluster):
    # Without the signal that the profile requests before the limit.
    no_signal = ["--set-resources", "train_sft:slurm_extra=--open-mode=append"]
    with started(
        with_settings(slow_tree, epochs=10000), SLOW, "--retries", "1", *no_signal
    ) as build:
        wait_for_steps(slow_tree, build)
        first = trainings(cluster)[-1]
        cluster.run("scontrol", "update", f"JobId={first['JobId']}", "TimeLimit=1")
        wait_until(lambda: trainings(cluster)[-1]["JobId"] != first["JobId"], 2 * LIMIT)
        step = saved_step(slow_tree)
        wait_until(lambda: saved_step(slow_tree) > step or not build.runs(), LIMIT)
        second = trainings(cluster)[-1]
        cluster.run("scancel", second["JobId"])
        status, output = build.end()
    assert status == 1
    assert f"SLURM-job '{first['JobId']}' failed, SLURM status is: 'TIMEOUT'" in output
    assert f"SLURM-job '{second['JobId']}' failed, SLURM status is: 'CANCELLED'" in output
    log = log_of(first["JobId"], output).read_text()
    assert f"stopped by SIGTERM after step {step}: run the same" in log
    asked = ("TimeLimit", "MinMemoryNode", "NumCPUs", "Partition")
    assert [second[key] for key in asked] == [first[key] for key in asked]
    # As much as the partition allows.
    assert first["TimeLimit"] == "02:00:00"


def test_the_same_command_after_the_head_was_killed_links_what_its_job_makes(slow_tree, cluster):
    before, tree = len(trainings(cluster)), with_settings(slow_tree, epochs=8)
    with started(tree, SLOW, "--retries", "0") as build:
        wait_for_steps(tree, build)
        build.send(signal.SIGKILL)
        build.process.wait()
    output = built(tree, SLOW, "--retries", "0")
    first, second = trainings(cluster)[before:]
    assert (first["JobState"], second["JobState"]) == ("COMPLETED", "COMPLETED")
    assert resumed_after(slow_tree) == 0
    assert "output/sft/slow is kept" in log_of(second["JobId"], output).read_text()


def test_a_job_whose_node_fails_resumes_on_another_node(slow_tree, cluster):
    with started(slow_tree, SLOW, "--retries", "0") as build:
        step = wait_for_steps(slow_tree, build)
        job = trainings(cluster)[-1]
        cluster.kill_node(job["BatchHost"], job["JobId"])
        try:
            status, output = build.end()
        finally:
            cluster.start_node(job["BatchHost"])
    assert status == 0, output[-5000:]
    requeued = trainings(cluster)[-1]
    assert (requeued["JobId"], requeued["Restarts"]) == (job["JobId"], "1")
    assert requeued["BatchHost"] != job["BatchHost"]
    assert resumed_after(slow_tree) >= step


def test_a_preempted_job_of_two_nodes_saves_and_is_resubmitted(slow_tree, cluster):
    tree = with_settings(slow_tree, epochs=8, placement={"nodes": 2})
    with started(tree, SLOW, "--retries", "1") as build:
        step = wait_for_steps(slow_tree, build)
        all_nodes = ("--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 5")
        cluster.run("sbatch", "--partition=urgent", *all_nodes)
        status, output = build.end()
    assert status == 0, output[-5000:]
    first, second = trainings(cluster)[-2:]
    assert (first["JobState"], second["JobState"]) == ("FAILED", "COMPLETED")
    assert resumed_after(slow_tree) >= step
    # A job that resumes asks for the same time.
    assert [job["TimeLimit"] for job in (first, second)] == ["02:00:00", "02:00:00"]
