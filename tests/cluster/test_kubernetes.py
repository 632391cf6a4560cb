"""Kubernetes: what pods are asked for, what they run, and jobs of several nodes.

No cluster is there. Manifests are held against the schemas of the API, Snakemake's plugin talks to
a stand-in whose pods are processes of this machine, and so are the nodes of a Kubeflow job.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import kubernetes
import kubernetes_validate
import pytest
import snakemake_executor_plugin_kubernetes as plugin
import yaml
from kubeflow.training import models as operator
from kubeflow_trainer_api import models as trainer

from conftest import ROOT, Workflow, copy_sources
from kubernetes_job import pytorch_job
from snakechat.planning.dry_run import PlannedJob
from support.pods import LOG, serving

PROFILE = ROOT / "profiles/kubernetes"
DOCKERFILE = (ROOT / "envs/Dockerfile").read_text()
# Of the oldest and the newest API that are maintained.
VERSIONS = ("1.34", "1.37")
SMALL = {
    "datasets": {"toy": {"rows": 120, "eval_rows": 20}},
    "sft": {"recipes": {"tiny": {"epochs": 1}}},
}
TRAINED = "output/sft/tiny.manifest.json"


def valid(document):
    """A manifest that the API takes, with nothing in it that it does not know."""
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)
    return document


def manifests(path):
    """All documents of a file."""
    return list(yaml.safe_load_all(path.read_text()))


@pytest.fixture(scope="module")
def cluster():
    with serving() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def workflow(cluster, tmp_path_factory):
    """A workflow on a volume, small, with a profile that knows where that is."""
    volume = tmp_path_factory.mktemp("volume")
    folder = volume / "snakechat"
    copy_sources(folder)
    (folder / "small.yaml").write_text(json.dumps(SMALL))
    profile = folder / "profiles/kubernetes/config.yaml"
    profile.write_text(profile.read_text().replace("/volume", str(volume)))
    workflow = Workflow(folder, "--configfile", "small.yaml")
    workflow.environment = {"KUBECONFIG": cluster.config(volume / "kubeconfig")}
    workflow.environment["PYTHONPATH"] = str(mended_plugin(volume / "plugins"))
    return workflow


def mended_plugin(folder):
    """A folder with the plugin as the image has it."""
    source = Path(plugin.__file__)
    shutil.copytree(source.parent, folder / source.parent.name)
    line = re.search("sed --in-place '(.*)'", DOCKERFILE)[1]
    subprocess.run(["sed", "-i", line, folder / source.parent.name / source.name], check=True)
    return folder


def on_kubernetes(workflow, *arguments):
    """Snakemake with the profile, in a hurry."""
    hurry = ("--seconds-between-status-checks", "1", "--latency-wait", "5")
    return workflow.snakemake("--profile", "profiles/kubernetes", *hurry, *arguments)


@pytest.fixture(scope="module")
def imported(cluster, workflow):
    """The job of a rule without GPUs, which has run in a pod."""
    process = on_kubernetes(workflow, "output/data/toy.manifest.json")
    logs = [log.read_text() for log, _ in cluster.pods.values()]
    assert process.returncode == 0, (process.stdout, logs)
    [job] = cluster.jobs.values()
    return job


@pytest.fixture(scope="module")
def prepared(imported, workflow):
    """The workflow with all that training needs."""
    workflow.build("output/tokens/sft/tiny.manifest.json", "output/models/tiny.manifest.json")
    return workflow


def container_of(job):
    """The only container of a job's pod."""
    [container] = job["spec"]["template"]["spec"]["containers"]
    return container


# --- pods of Snakemake ------------------------------------------------------------------------


def test_a_job_runs_in_a_pod_on_the_volume(imported, cluster, workflow, tmp_path):
    job = valid({"apiVersion": "batch/v1", "kind": "Job", **imported})
    container, volume = container_of(job), workflow.folder.parent
    assert container["image"] == "registry.example.com/snakechat:1"
    assert {"name": "snakechat", "mountPath": str(volume)} in container["volumeMounts"]
    claim = {"name": "snakechat", "persistentVolumeClaim": {"claimName": "snakechat"}}
    assert claim in job["spec"]["template"]["spec"]["volumes"]
    assert not cluster.secrets
    # Nothing was copied, nothing installed.
    files = [path for path in (workflow.folder / ".snakemake").rglob("*") if path.is_file()]
    assert files and not {"storage", "pip-deployments"} & {part for f in files for part in f.parts}
    # The same as on this machine.
    copy_sources(tmp_path)
    shutil.copy(workflow.folder / "small.yaml", tmp_path)
    Workflow(tmp_path, *workflow.options).build("output/data/toy.manifest.json")
    made = [folder / "output/data/toy.manifest.json" for folder in (workflow.folder, tmp_path)]
    assert made[0].read_bytes() == made[1].read_bytes()


def test_a_job_without_gpus_asks_for_none(imported):
    resources = container_of(imported)["resources"]
    assert resources["limits"] == {
        "cpu": "1000m",
        "memory": "8000M",
        "ephemeral-storage": "20000M",
    }
    assert resources["requests"] == {**resources["limits"], "cpu": "950m"}
    assert "tolerations" not in imported["spec"]["template"]["spec"]


def test_a_job_with_gpus_has_them_as_a_limit_and_is_tried_again_with_more_memory(prepared, cluster):
    before = set(cluster.jobs)
    cluster.run = False
    try:
        process = on_kubernetes(
            prepared, TRAINED, "--config", "deployment=single_gpu", "--retries", "1"
        )
    finally:
        cluster.run = True
    assert process.returncode == 1
    told = re.findall(r"\S+/kubernetes-logs/\S+\.log", process.stdout)
    assert len(told) == 2 and all(LOG in Path(path).read_text() for path in told)
    jobs = [job for name, job in cluster.jobs.items() if name not in before]
    resources = [container_of(job)["resources"] for job in jobs]
    assert [asked["limits"] for asked in resources] == [
        {
            "cpu": "8000m",
            "memory": f"{memory}M",
            "ephemeral-storage": "20000M",
            "nvidia.com/gpu": "1",
        }
        for memory in (64000, 96000)
    ]
    for job, asked in zip(jobs, resources, strict=True):
        valid({"apiVersion": "batch/v1", "kind": "Job", **job})
        assert asked["requests"] == {**asked["limits"], "cpu": "7600m"}
        [toleration] = job["spec"]["template"]["spec"]["tolerations"]
        assert toleration["key"] == "nvidia.com/gpu"


def test_results_of_pods_may_be_in_another_folder_of_the_volume(workflow, cluster):
    before = set(cluster.jobs)
    cluster.run = False
    try:
        on_kubernetes(
            workflow, "--directory", "runs/1", "output/data/toy.manifest.json", "--retries", "0"
        )
    finally:
        cluster.run = True
    [job] = [job for name, job in cluster.jobs.items() if name not in before]
    words = shlex.split(container_of(job)["args"][1])
    assert words[words.index("--directory") + 1] == str(workflow.folder / "runs/1")
    assert words[words.index("--snakefile") + 1] == str(workflow.folder / "Snakefile")


# --- what a user applies ----------------------------------------------------------------------


def test_manifests_are_what_the_api_takes():
    for path in (PROFILE / "volume.yaml", PROFILE / "driver.yaml"):
        for document in manifests(path):
            valid(document)


def test_profile_volume_and_driver_name_the_same_claim_path_and_image():
    profile = yaml.safe_load((PROFILE / "config.yaml").read_text())
    [claim, path] = profile["kubernetes-persistent-volumes"][0].split(":")
    [volume] = manifests(PROFILE / "volume.yaml")
    assert volume["metadata"]["name"] == claim
    driver = manifests(PROFILE / "driver.yaml")[-1]["spec"]["template"]["spec"]
    [mounted] = driver["volumes"]
    assert mounted["persistentVolumeClaim"]["claimName"] == claim
    for container in driver["containers"] + driver["initContainers"]:
        assert container["image"] == profile["container-image"]
        assert container["volumeMounts"] == [{"name": mounted["name"], "mountPath": path}]


def test_the_driver_may_do_what_the_plugin_does():
    role = next(document for document in manifests(PROFILE / "driver.yaml") if "rules" in document)
    may = {
        (verb, resource)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    called = re.findall(
        r"(?:kubeapi|batchapi)\.(create|read|list|delete)_namespaced_(\w+)",
        Path(plugin.__file__).read_text(),
    )
    names = {"job_status": "jobs/status", "pod_log": "pods/log"}
    needed = {(verb.replace("read", "get"), names.get(kind, f"{kind}s")) for verb, kind in called}
    assert len(needed) == 8 and needed <= may


# --- the image --------------------------------------------------------------------------------


def test_the_image_has_files_that_are_there_and_no_others_are_sent():
    copied = re.search(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE)[1].split()
    assert all((ROOT / name).is_file() for name in copied)
    ignored = (ROOT / "envs/Dockerfile.dockerignore").read_text().splitlines()
    assert ignored == ["*", *(f"!{name}" for name in copied)]
    assert [f"/opt/snakechat/{name}" for name in copied] == re.findall(
        r"--requirement (\S+)", DOCKERFILE
    )


def test_the_image_has_a_user_of_its_own_who_owns_the_volume():
    number = re.search(r"useradd --uid (\d+)", DOCKERFILE)[1]
    assert re.findall("^USER (.*)$", DOCKERFILE, re.MULTILINE) == [number]
    driver = manifests(PROFILE / "driver.yaml")[-1]["spec"]["template"]["spec"]
    assert driver["initContainers"][0]["command"][:2] == ["chown", f"{number}:{number}"]


def test_the_plugin_still_needs_to_be_mended():
    assert Path(plugin.__file__).read_text().count("previous=True") == 1


# --- several nodes ----------------------------------------------------------------------------

# Two nodes, without GPUs and with.
NODES = {"nodes": 2, "gpus_per_node": 0, "zero_stage": 0, "offload": "none"}
NODES |= {"activation_checkpointing": False, "micro_batch_tokens": 8192}
NODES |= {"threads": 2, "mem_mb": 4000, "runtime": 60}


@pytest.fixture(scope="module")
def two_nodes(prepared):
    """Options that place training on two nodes; with GPUs, it has eight on each."""
    for name, gpus in {"two": 0, "gpus": 8}.items():
        deployments = {"two": {**NODES, "gpus_per_node": gpus}}
        config = {**SMALL, "deployments": deployments, "deployment": "two"}
        (prepared.folder / f"{name}.yaml").write_text(json.dumps(config))
    return ("--configfile", "two.yaml")


def job_of(workflow, *arguments):
    """The documents that the generator writes."""
    process = workflow.run("python", "scripts/kubernetes_job.py", *arguments)
    assert process.returncode == 0, process.stdout
    return list(yaml.safe_load_all(process.stdout))


def as_read(document):
    """A document as the client of its API reads it: what that does not know is not in it."""
    if document["apiVersion"] == "kubeflow.org/v1":
        # Where the client of Kubernetes looks for the parts of an object.
        vars(kubernetes.client.models).update(vars(operator))
        client = kubernetes.client.ApiClient()
        response = SimpleNamespace(data=json.dumps(document))
        read = client.deserialize(response, f"KubeflowOrgV1{document['kind']}")
        return client.sanitize_for_serialization(read)
    return getattr(trainer, f"TrainerV1alpha1{document['kind']}").from_dict(document).to_dict()


def as_job(template):
    """A pod of an operator, in a job that the API knows."""
    spec = {**template["spec"], "restartPolicy": "Never"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "pod"},
        "spec": {"template": {"spec": spec}},
    }


def test_a_pytorch_job_has_a_pod_for_each_node(two_nodes, prepared):
    [job] = job_of(prepared, "output/sft/tiny", "--", "--configfile", "gpus.yaml")
    assert as_read(job) == job
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {kind: replica["replicas"] for kind, replica in replicas.items()} == {
        "Master": 1,
        "Worker": 1,
    }
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    pod = valid(as_job(replicas["Master"]["template"]))
    limits = {"cpu": "2", "memory": "4000M", "nvidia.com/gpu": "8"}
    resources = container_of(pod)["resources"]
    assert resources == {"limits": limits, "requests": {**limits, "cpu": "1900m"}}
    assert "/dev/shm" in [mount["mountPath"] for mount in container_of(pod)["volumeMounts"]]


def test_a_pytorch_job_of_one_node_has_no_workers():
    spec = {"rule": "train_sft", "name": "Llama_3.1"}
    job = PlannedJob(spec, {**NODES, "nodes": 1, "gpus_per_node": 8}, "")
    profile = yaml.safe_load((PROFILE / "config.yaml").read_text())
    [document] = pytorch_job(job, "/volume/snakechat", profile)
    assert as_read(document) == document
    assert re.fullmatch("train-sft-llama-3-1-[0-9a-f]{8}", document["metadata"]["name"])
    assert document["spec"]["nprocPerNode"] == "8"
    assert set(document["spec"]["pytorchReplicaSpecs"]) == {"Master"}


def test_a_train_job_has_as_many_nodes_and_the_same_pods(two_nodes, prepared):
    options = ("output/sft/tiny", "--", "--configfile", "gpus.yaml")
    [pytorch] = job_of(prepared, *options)
    runtime, job = job_of(prepared, "--kind", "TrainJob", *options)
    assert as_read(runtime) == runtime
    assert as_read(job) == job
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 2
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = valid(as_job(node["template"]["spec"]["template"]))
    same = as_job(pytorch["spec"]["pytorchReplicaSpecs"]["Master"]["template"])
    container_of(same)["name"] = "node"
    assert pod == same


def test_nodes_of_a_kubeflow_job_build_what_two_processes_here_build(two_nodes, prepared, tmp_path):
    [job] = job_of(prepared, "output/sft/tiny", "--", *two_nodes)
    command = container_of(as_job(job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]))[
        "command"
    ]
    kubeflow, here = (prepared.copy(tmp_path / name) for name in ("kubeflow", "here"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # What the operator tells a pod.
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    group |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_PORT": port}
    group |= {"PET_MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    pods = [
        subprocess.Popen(
            [sys.executable, *command[1:]],
            cwd=kubeflow.folder,
            env={**os.environ, **group, "RANK": rank, "PET_NODE_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    # Two processes that no operator started.
    torchrun = [command[1], "--standalone", "--nproc-per-node=2", *command[2:]]
    here.environment = {"OMP_NUM_THREADS": "1"}
    process = here.run("python", *torchrun)
    assert process.returncode == 0, process.stdout
    said = [pod.communicate(timeout=120)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    made = [workflow.folder / TRAINED for workflow in (kubeflow, here)]
    assert made[0].read_bytes() == made[1].read_bytes()
    # Snakemake takes it for what it would have made.
    assert "train_sft" in prepared.planned("output/sft/tiny")
    assert "train_sft" not in kubeflow.planned("output/sft/tiny")


def test_what_is_missing_is_told_with_what_builds_it(two_nodes, prepared, tmp_path):
    copy_sources(tmp_path / "fresh")
    fresh = Workflow(tmp_path / "fresh")
    shutil.copy(prepared.folder / "two.yaml", fresh.folder)
    generator = ("python", "scripts/kubernetes_job.py", "output/sft/tiny", "--")
    process = fresh.run(*generator, *two_nodes)
    assert process.returncode == 1
    assert process.stdout == (
        "error: train_sft tiny has inputs to build first: snakemake --profile kubernetes"
        " output/models/tiny.manifest.json output/tokens/sft/tiny.manifest.json"
        " --configfile two.yaml\n"
    )
    process = fresh.run(*generator)
    assert (
        process.stdout == "error: output/sft/tiny: no training to run takes several GPUs or nodes\n"
    )


def test_a_folder_that_pods_do_not_see_is_refused(two_nodes, prepared, tmp_path):
    copy = prepared.copy(tmp_path / "copy")
    process = copy.run("python", "scripts/kubernetes_job.py", "output/sft/tiny", "--", *two_nodes)
    assert process.returncode == 1
    assert process.stdout == (
        f"error: {copy.folder} is not on the volume, which pods have at {prepared.folder.parent}"
        f" ({copy.folder}/profiles/kubernetes/config.yaml)\n"
    )
