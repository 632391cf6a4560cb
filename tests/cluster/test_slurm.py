"""A whole build on a real Slurm, and what becomes of jobs that fail, wait or are stopped.

make test-slurm. Needs root and Debian's packages slurm-wlm and munge.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, SOURCES, Workflow
from support.cluster import CONF, SLURM_CONF, Cluster, wait_until

pytestmark = pytest.mark.slurm

# Seconds: nothing here takes as long, unless it hangs.
LIMIT = 240
# Jobs here are short, and the GPUs of these nodes are none: trainings are on the CPU, and ask Slurm
# for GPUs all the same.
OPTIONS = [
    *("--profile", "slurm", "--latency-wait", "10"),
    *("--slurm-init-seconds-before-status-checks", "14"),
    # The last: tests have one more.
    *(
        "--configfile",
        str(ROOT / "tests/configs/quick.yaml"),
        str(ROOT / "tests/configs/slurm.yaml"),
    ),
]
SLOW = "output/sft/slow.manifest.json"
GPUS = ["--set-resources", "train_sft:gpu=2", "train_reward:gpu=2", "train_rlhf:gpu=1"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes with two GPUs each, all stopped at the end."""
    if os.getuid() or not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))):
        pytest.skip("needs root and the packages slurm-wlm and munge")
    if CONF.exists() and not CONF.read_text().startswith(SLURM_CONF[:20]):
        pytest.skip(f"{CONF} is there: another Slurm's")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


class Build:
    """Snakemake at work on the cluster; its output goes into a file."""

    def __init__(self, workflow, *arguments):
        self.log = workflow.folder / "build.log"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["snakemake", *arguments, *workflow.options],
                cwd=workflow.folder,
                env={**os.environ, "PATH": path},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self):
        """Wait for the end; returns the exit status and what was said."""
        status = self.process.wait(LIMIT)
        return status, self.log.read_text()


@contextlib.contextmanager
def started(workflow, *arguments):
    """A build that is killed at the end of the block, if it still runs."""
    build = Build(workflow, *arguments)
    try:
        yield build
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(build.process.pid, signal.SIGKILL)
        build.process.wait()


def built(workflow, *arguments):
    """Build targets; returns what Snakemake said."""
    with started(workflow, *arguments) as build:
        status, said = build.end()
    assert status == 0, said[-5000:]
    return said


@pytest.fixture(scope="module")
def prepared(cluster, tmp_path_factory):
    """A checkout with a link to the profile, whose data have been prepared on the cluster."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        if name == "slurm":
            (folder / name).symlink_to("profiles/slurm")
        elif (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name)
        else:
            shutil.copy(ROOT / name, folder / name)
    workflow = Workflow(folder, *OPTIONS)
    tokens = [f"output/tokens/{stage}/tiny.manifest.json" for stage in ("sft", "reward", "rlhf")]
    tokens.append("output/tokens/sft/slow.manifest.json")
    built(workflow, *tokens)
    return workflow


def trainings(cluster):
    """The jobs so far that trained the slow recipe, oldest first."""
    comment = "rule_train_sft_wildcards_slow"
    return [job for job in cluster.jobs() if job.get("Comment") == comment]


def changed(workflow, **settings):
    """The workflow with other settings of the slow recipe."""
    path = workflow.folder / "changed.json"
    path.write_text(json.dumps({"sft": {"recipes": {"slow": settings}}}))
    return Workflow(workflow.folder, *workflow.options, str(path))


@pytest.fixture
def slow_tree(prepared):
    """The checkout without anything that a test before made of the slow recipe."""
    for path in prepared.folder.glob("output/s*/**/slow*"):
        if "tokens" not in str(path) and "specs" not in str(path):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return prepared


def saved_step(workflow):
    """The last step that the training has saved; 0: none."""
    states = workflow.folder.glob("output/state/train_sft/slow/*/[0-9]*")
    return max((int(path.name) for path in states), default=0)


def wait_for_steps(workflow, build):
    """Wait until the training has saved some; returns the last one."""
    wait_until(lambda: saved_step(workflow) > 20 or build.process.poll() is not None, LIMIT / 2)
    assert build.process.poll() is None, build.log.read_text()[-5000:]
    return saved_step(workflow)


def resumed_after(workflow):
    """The step that the last run of the training began behind."""
    record = workflow.folder / "output/sft/slow.run.json"
    return json.loads(record.read_text())["resumed_after_step"]


def stopped_after(log):
    """The step of which a job's log says that it was stopped behind it."""
    said = re.findall(r"stopped by SIGTERM after step (\d+): the same command", log.read_text())
    return int(said[0])


def log_of(job, said):
    """The log of a job at which a build that fails points."""
    [log] = set(re.findall(rf"\S+/slurm_logs/\S+/{job}\.log", said))
    return Path(log)


# --- a build --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(prepared, cluster):
    """The tiny recipe to its report, with the jobs that it took, by rule."""
    built(prepared, "output/rlhf/tiny", *GPUS)
    jobs = [job for job in cluster.jobs() if "Comment" in job]
    return prepared, {job["Comment"].split("_wildcards")[0]: job for job in jobs}


def test_the_tiny_recipe_is_built_from_its_data_to_its_report(tiny):
    workflow, _ = tiny
    assert (workflow.folder / "output/rlhf/tiny/model.safetensors").exists()
    assert (workflow.folder / "output/report/tiny.manifest.json").exists()
    local = Workflow(workflow.folder, *OPTIONS[-3:])
    assert local.planned("output/rlhf/tiny") == set()


def test_training_asks_for_gpus_and_nothing_else_does(tiny):
    _, jobs = tiny
    asked = {rule: job.get("TresPerJob") for rule, job in jobs.items()}
    training = {"rule_train_sft": "gres:gpu:2", "rule_train_reward": "gres:gpu:2"}
    training["rule_train_rlhf"] = "gres:gpu:1"
    assert {rule: gpus for rule, gpus in asked.items() if gpus} == training
    data = ("import_dataset", "split_dataset", "init_model", "tokenize_sft", "tokenize_rlhf")
    assert asked.keys() > training.keys() | {f"rule_{rule}" for rule in data}


def test_sft_and_reward_are_trained_at_the_same_time_on_different_nodes(tiny):
    _, jobs = tiny
    first, second = jobs["rule_train_sft"], jobs["rule_train_reward"]
    assert {first["BatchHost"], second["BatchHost"]} == {"n1", "n2"}
    assert max(first["StartTime"], second["StartTime"]) < min(first["EndTime"], second["EndTime"])


def test_pages_are_no_jobs(tiny):
    _, jobs = tiny
    assert not {"rule_draw_report", "rule_report", "rule_rlhf"} & jobs.keys()


def test_two_nodes_come_to_the_bytes_of_two_processes_here(slow_tree, cluster, tmp_path):
    gpus = ("--set-resources", "train_sft:gres=gpu:1")
    built(changed(slow_tree, epochs=1, placement={"nodes": 2}), SLOW, *gpus)
    job = trainings(cluster)[-1]
    assert (job["NumNodes"], job["NodeList"]) == ("2", "n[1-2]")
    assert job["TresPerNode"] == "gres:gpu:1"
    here = slow_tree.copy(tmp_path / "here").folder
    manifest = here / SLOW
    spec, on_slurm = tmp_path / "spec.json", manifest.read_text()
    spec.write_text(json.dumps(json.loads(on_slurm)["spec"]))
    record = json.loads(manifest.with_name("slow.run.json").read_text())
    shutil.rmtree(here / "output/sft/slow")
    manifest.unlink()
    # As Kubernetes starts the nodes of a job.
    command = ["scripts/launch.py", "scripts/train_sft.py", "--spec", str(spec)]
    command += ["--placement", json.dumps(record["placement"])]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "2"}
    nodes = [
        subprocess.Popen(
            [sys.executable, *command], cwd=here, env={**os.environ, **group, "RANK": str(number)}
        )
        for number in range(2)
    ]
    assert [node.wait(LIMIT) for node in nodes] == [0, 0]
    assert manifest.read_text() == on_slurm


PROGRAM = """
import json
import os
import sys
from pathlib import Path

names = ("SLURM_NODEID", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps([os.environ[name] for name in names]))
"""


def test_each_gpu_of_each_node_has_a_process(cluster, tmp_path):
    program, told = tmp_path / "program.py", tmp_path / "told"
    program.write_text(PROGRAM)
    told.mkdir()
    placement = json.dumps({"nodes": 2, "gpus_per_node": 2, "threads": 2})
    words = [sys.executable, ROOT / "scripts/launch.py", program, told, "--placement", placement]
    job = ("--nodes=2", "--gres=gpu:2", "--cpus-per-task=2", f"--output={tmp_path / 'log'}")
    cluster.run("sbatch", "--wait", *job, f"--wrap={shlex.join(map(str, words))}")
    found = {path.name: json.loads(path.read_text()) for path in told.iterdir()}
    assert found == {
        str(2 * node + gpu): [str(node), str(gpu), "4", "0,1"] for node in (0, 1) for gpu in (0, 1)
    }


# --- what may go wrong ----------------------------------------------------------------------


def test_a_job_that_fails_says_why_and_where_its_log_is(slow_tree, cluster):
    with started(changed(slow_tree, learning_rate=1e30), SLOW, "--retries", "0") as build:
        status, said = build.end()
    assert status == 1
    assert "loss is nan, training has diverged" in said
    log = log_of(trainings(cluster)[-1]["JobId"], said)
    assert "loss is nan, training has diverged" in log.read_text()


def test_a_job_that_is_cancelled_is_told_and_the_same_command_goes_on(slow_tree, cluster):
    with started(slow_tree, SLOW, "--retries", "0") as build:
        step = wait_for_steps(slow_tree, build)
        job = trainings(cluster)[-1]["JobId"]
        cluster.run("scancel", job)
        status, said = build.end()
    assert status == 1
    assert f"SLURM-job '{job}' failed, SLURM status is: 'CANCELLED'" in said
    # Slurm gives it time to save.
    last = stopped_after(log_of(job, said))
    assert last >= step
    built(slow_tree, SLOW)
    assert resumed_after(slow_tree) == last


def test_a_job_that_runs_out_of_time_has_saved(slow_tree, cluster):
    # Not asked to stop before the time is up.
    unasked = ["--set-resources", "train_sft:slurm_extra=--open-mode=append"]
    with started(changed(slow_tree, epochs=10000), SLOW, "--retries", "0", *unasked) as build:
        wait_for_steps(slow_tree, build)
        job = trainings(cluster)[-1]["JobId"]
        cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
        status, said = build.end()
    assert status == 1
    assert f"SLURM-job '{job}' failed, SLURM status is: 'TIMEOUT'" in said
    assert saved_step(slow_tree) == stopped_after(log_of(job, said))


def test_a_job_whose_node_is_lost_goes_on_at_another(slow_tree, cluster):
    with started(slow_tree, SLOW, "--retries", "0") as build:
        step = wait_for_steps(slow_tree, build)
        job = trainings(cluster)[-1]
        cluster.kill_node(job["BatchHost"], job["JobId"])
        try:
            status, said = build.end()
        finally:
            cluster.start_node(job["BatchHost"])
    assert status == 0, said[-5000:]
    again = trainings(cluster)[-1]
    assert (again["JobId"], again["Restarts"]) == (job["JobId"], "1")
    assert again["BatchHost"] != job["BatchHost"]
    assert resumed_after(slow_tree) >= step


def test_a_job_of_two_nodes_that_gives_way_to_another_goes_on_after_it(slow_tree, cluster):
    """Preempted: asked to stop, with time to save; Snakemake then submits it anew."""
    tree = changed(slow_tree, epochs=8, placement={"nodes": 2})
    with started(tree, SLOW, "--retries", "1") as build:
        step = wait_for_steps(slow_tree, build)
        everything = ("--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 5")
        cluster.run("sbatch", "--partition=urgent", *everything)
        status, said = build.end()
    assert status == 0, said[-5000:]
    first, second = trainings(cluster)[-2:]
    assert (first["JobState"], second["JobState"]) == ("FAILED", "COMPLETED")
    assert resumed_after(slow_tree) >= step
    # With half more time than it had.
    assert [job["TimeLimit"] for job in (first, second)] == ["01:00:00", "01:30:00"]
