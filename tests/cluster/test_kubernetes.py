"""Kubernetes: the pods that Snakemake requests, and Kubeflow jobs of several nodes.

Without a cluster: manifests are validated against the schemas of the API, Snakemake's plugin talks
to a stub whose pods are processes of this machine, and so are the nodes of a Kubeflow job.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import kubernetes
import kubernetes_validate
import pytest
import snakemake_executor_plugin_kubernetes as plugin
import yaml
from kubeflow.training import models as operator

from conftest import PYTHON, ROOT, Workflow, copy_sources
from kubernetes_job import DRIVER as DRIVER_FILE
from kubernetes_job import completed
from launch import free_port
from snakechat.workflow.snakemake_adapter import POD_SECURITY
from support.pods import LOG, serving

FOLDER = ROOT / "profiles/kubernetes"
PROFILE = yaml.safe_load((FOLDER / "config.yaml").read_text())
[NAMESPACE], [VOLUME] = (
    list(yaml.safe_load_all((FOLDER / name).read_text()))
    for name in ("namespace.yaml", "volume.yaml")
)
DRIVER = completed(DRIVER_FILE, PROFILE)
DRIVER_POD = DRIVER[-1]["spec"]["template"]["spec"]
DOCKERFILE = (ROOT / "envs/Dockerfile").read_text()
# The oldest and the newest maintained API.
VERSIONS = ("1.34", "1.37")
SMALL = {
    "datasets": {"toy": {"rows": 120, "eval_rows": 20}},
    "sft": {"recipes": {"tiny": {"epochs": 1}}},
}
TRAINED = "output/sft/tiny.manifest.json"


def valid(document):
    """Validate a manifest against the API, without unknown fields, and return it."""
    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)
    return document


@pytest.fixture(scope="module")
def cluster():
    with serving() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def workflow(cluster, tmp_path_factory):
    """A small workflow on a volume, with a profile that has the path of the volume."""
    volume = tmp_path_factory.mktemp("volume")
    folder = volume / "snakechat"
    copy_sources(folder)
    (folder / "small.yaml").write_text(json.dumps(SMALL))
    profile = folder / "profiles/kubernetes/config.yaml"
    profile.write_text(profile.read_text().replace("/volume", str(volume)))
    workflow = Workflow(folder, "--configfile", "small.yaml")
    workflow.environment = {"KUBECONFIG": cluster.config(volume / "kubeconfig")}
    return workflow


def on_kubernetes(workflow, *arguments):
    """Run Snakemake with the profile and short intervals."""
    intervals = ("--seconds-between-status-checks", "1", "--latency-wait", "5")
    # In a new process: the client reads KUBECONFIG when it is imported.
    profile = ("--profile", "profiles/kubernetes")
    return workflow.run("snakemake", *profile, *intervals, *arguments, *workflow.options)


# Edits between the planning of a job and its start, which would let it fail or change its result.
EDITS = {
    "rules/data.smk": "raise SystemExit('edited')",
    "scripts/import_dataset.py": "raise SystemExit('edited')",
    "small.yaml": json.dumps({"datasets": {"toy": {"rows": 40}}}),
    "config.yaml": "edited: 1",
}


@pytest.fixture(scope="module")
def imported(cluster, workflow):
    """The job of a rule without GPUs, after it ran in a pod, and its spec."""
    before, start = {name: (workflow.folder / name).read_text() for name in EDITS}, cluster.start

    def write(texts):
        for name, text in texts.items():
            (workflow.folder / name).write_text(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "start", lambda job: (write(EDITS), start(job)))
        process = on_kubernetes(workflow, "output/data/toy.manifest.json")
    write(before)
    logs = [log.read_text() for log, _ in cluster.pods.values()]
    assert process.returncode == 0, (process.stdout, logs)
    [job] = cluster.jobs.values()
    return job, workflow.spec_of("output/data/toy")


@pytest.fixture(scope="module")
def prepared(imported, workflow):
    """The workflow with the inputs of the SFT training."""
    workflow.build("output/tokens/sft/tiny.manifest.json", "output/models/tiny.manifest.json")
    return workflow


def check_restricted(pod):
    """Assert what the restricted Pod Security Standard of Kubernetes asks of these pods."""
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True and security["runAsUser"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
    kinds = {kind for volume in pod["volumes"] for kind in volume.keys() - {"name"}}
    assert kinds <= {"persistentVolumeClaim", "emptyDir", "configMap", "secret"}
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not any(port.get("hostPort") for port in container.get("ports", ()))


def container_of(job):
    """Return the only container of the pod of a job."""
    [container] = job["spec"]["template"]["spec"]["containers"]
    return container


# --- pods of Snakemake ------------------------------------------------------------------------


def test_a_job_runs_in_a_pod_on_the_volume(imported, cluster, workflow):
    job, spec = imported
    # It ran what was planned, though all of that was edited in the meantime.
    assert spec["settings"]["rows"] == SMALL["datasets"]["toy"]["rows"]
    valid({"apiVersion": "batch/v1", "kind": "Job", **job})
    container, volume = container_of(job), workflow.folder.parent
    assert container["image"] == PROFILE["container-image"]
    check_restricted(job["spec"]["template"]["spec"])
    assert job["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    assert not cluster.secrets
    assert {"name": "snakechat", "mountPath": str(volume)} in container["volumeMounts"]
    claim = {"name": "snakechat", "persistentVolumeClaim": {"claimName": "snakechat"}}
    assert claim in job["spec"]["template"]["spec"]["volumes"]
    # The plugin copied and installed nothing.
    files = [path for path in (workflow.folder / ".snakemake").rglob("*") if path.is_file()]
    assert files and not {"storage", "pip-deployments"} & {part for f in files for part in f.parts}


def test_a_job_with_gpus_limits_them_and_is_retried(prepared, cluster):
    before = set(cluster.jobs)
    one_gpu = ("--config", "deployment=single_gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "run", False)
        process = on_kubernetes(prepared, TRAINED, *one_gpu, "--retries", "1")
    assert process.returncode == 1
    # A build repeats the errors of its jobs.
    logs = set(re.findall(r"\S+/kubernetes-logs/\S+\.log", process.stdout))
    assert len(logs) == 2 and all(LOG in Path(path).read_text() for path in logs)
    jobs = [job for name, job in cluster.jobs.items() if name not in before]
    assert len(jobs) == 2
    for job in jobs:
        valid({"apiVersion": "batch/v1", "kind": "Job", **job})
        limits = {"cpu": "8000m", "memory": "64000M", "nvidia.com/gpu": "1"}
        limits["ephemeral-storage"] = "20000M"
        resources = {"limits": limits, "requests": {**limits, "cpu": "7600m"}}
        assert container_of(job)["resources"] == resources
        [toleration] = job["spec"]["template"]["spec"]["tolerations"]
        assert toleration["key"] == "nvidia.com/gpu"


# --- manifests for kubectl apply --------------------------------------------------------------


def test_manifests_are_valid_and_follow_the_profile():
    for document in (NAMESPACE, VOLUME, *DRIVER):
        valid(document)
    # Its namespace accepts restricted pods alone.
    labels = NAMESPACE["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert NAMESPACE["metadata"]["name"] == PROFILE["kubernetes-namespace"]
    assert re.fullmatch(r"\S+@sha256:[0-9a-f]{64}", PROFILE["container-image"])
    assert PROFILE["kubernetes-persistent-volumes"] == [f"{VOLUME['metadata']['name']}:/volume"]
    own = {"kubernetes-namespace": "team", "kubernetes-persistent-volumes": ["disk:/mnt/disk"]}
    *documents, deployment = completed(DRIVER_FILE, {**PROFILE, **own})
    for document in (*documents, deployment):
        assert valid(document)["metadata"]["namespace"] == "team"
    assert documents[-1]["subjects"][0]["namespace"] == "team"
    pod = deployment["spec"]["template"]["spec"]
    [container], [mounted] = pod["containers"], pod["volumes"]
    assert container["image"] == PROFILE["container-image"]
    assert mounted["persistentVolumeClaim"] == {"claimName": "disk"}
    assert container["volumeMounts"] == [{"name": mounted["name"], "mountPath": "/mnt/disk"}]
    # All pods run as the user of the image.
    number = re.search(r"useradd .*--uid (\d+)", DOCKERFILE)[1]
    assert re.findall("^USER (.*)$", DOCKERFILE, re.MULTILINE) == [number]
    training = yaml.safe_load((FOLDER / "training.yaml").read_text())
    master = training["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    assert DRIVER_POD["securityContext"] == master["securityContext"] == POD_SECURITY
    assert {POD_SECURITY[key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {int(number)}
    # It alone gets a token.
    check_restricted(DRIVER_POD)
    assert DRIVER[0]["automountServiceAccountToken"] is False
    assert DRIVER_POD["automountServiceAccountToken"] is True


def test_the_role_of_the_driver_permits_exactly_the_calls_of_the_plugin():
    role = next(document for document in DRIVER if "rules" in document)
    permitted = {
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
    assert len(needed) == 8 and needed == permitted


def test_the_dockerfile_has_no_lint():
    process = subprocess.run(["hadolint", ROOT / "envs/Dockerfile"], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout


# --- several nodes ----------------------------------------------------------------------------

# A placement of two nodes without GPUs.
NODES = {"nodes": 2, "gpus_per_node": 0, "zero_stage": 0, "offload": "none", "runtime": 60}
NODES |= {"activation_checkpointing": False, "micro_batch_tokens": 8192, "threads": 2}
NODES |= {"mem_mb": 4000}


@pytest.fixture(scope="module")
def two_nodes(prepared):
    """Options that place trainings on two nodes without GPUs; gpus.yaml has eight GPUs on each."""
    for name, changes in {"two": {"threads": 1}, "gpus": {"gpus_per_node": 8}}.items():
        deployments = {"two": {**NODES, **changes}}
        config = {**SMALL, "deployments": deployments, "deployment": "two"}
        (prepared.folder / f"{name}.yaml").write_text(json.dumps(config))
    return ("--configfile", "two.yaml")


def training_job(workflow, *options):
    """Return the document that kubernetes_job.py writes."""
    words = ("python", "scripts/kubernetes_job.py", "output/sft/tiny", *options)
    process = workflow.run(*words)
    assert process.returncode == 0, process.stdout
    return yaml.safe_load(process.stdout)


def as_read(document):
    """Return a document as the client of its API reads it, without unknown fields."""
    # The Kubernetes client looks up the types of nested objects here.
    vars(kubernetes.client.models).update(vars(operator))
    client = kubernetes.client.ApiClient()
    response = SimpleNamespace(data=json.dumps(document))
    read = client.deserialize(response, f"KubeflowOrgV1{document['kind']}")
    return client.sanitize_for_serialization(read)


def as_job(template):
    """Return the pod template of an operator in a Job, which the API can validate."""
    spec = {**template["spec"], "restartPolicy": "Never"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "pod"},
        "spec": {"template": {"spec": spec}},
    }


def test_a_pytorch_job_has_a_pod_for_each_node(two_nodes, prepared, tmp_path):
    # What a cluster adds to the file of trainings.
    workflow = prepared.copy(prepared.folder.parent / "queued")
    path = workflow.folder / "profiles/kubernetes/training.yaml"
    text = path.read_text().replace("  name: $name", "  name: $name\n  labels: {queue: team}")
    path.write_text(text.replace("limits: {", 'limits: {rdma/hca: "1", '))
    job = training_job(workflow, "--configfile", "gpus.yaml")
    assert as_read(job) == job
    assert job["metadata"]["labels"] == {"queue": "team"}
    assert job["metadata"]["namespace"] == PROFILE["kubernetes-namespace"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert [replicas[kind]["replicas"] for kind in ("Master", "Worker")] == [1, 1]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    pod = valid(as_job(replicas["Master"]["template"]))
    check_restricted(pod["spec"]["template"]["spec"])
    assert pod["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    requests = {"cpu": "1900m", "memory": "4000M", "nvidia.com/gpu": "8"}
    limits = {**requests, "cpu": "2", "rdma/hca": "1"}
    assert container_of(pod)["resources"] == {"limits": limits, "requests": requests}
    assert "/dev/shm" in [mount["mountPath"] for mount in container_of(pod)["volumeMounts"]]


def test_nodes_of_a_kubeflow_job_build_a_result(two_nodes, prepared, tmp_path):
    job = training_job(prepared, *two_nodes)
    master = as_job(job["spec"]["pytorchReplicaSpecs"]["Master"]["template"])
    command = container_of(master)["command"]
    assert container_of(master)["resources"]["limits"] == {"cpu": "1", "memory": "4000M"}
    kubeflow = prepared.copy(tmp_path / "kubeflow")
    # As the operator's port, not one that the kernel would choose.
    port = str(free_port(23456))
    # The variables that the operator sets in a pod.
    group = {"WORLD_SIZE": "2", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}
    for prefix in ("", "PET_"):
        group |= {f"{prefix}MASTER_ADDR": "127.0.0.1", f"{prefix}MASTER_PORT": port}
    pods = [
        subprocess.Popen(
            [PYTHON, *command[1:]],
            cwd=kubeflow.folder,
            env={**kubeflow.variables(), **group, "RANK": rank, "PET_NODE_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in ("0", "1")
    ]
    outputs = [pod.communicate(timeout=120)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], outputs
    # For Snakemake the result is up to date.
    assert "train_sft" in prepared.planned("output/sft/tiny")
    assert "train_sft" not in kubeflow.planned("output/sft/tiny")


def test_missing_inputs_are_an_error_with_the_command_that_makes_them(two_nodes, prepared, sources):
    shutil.copy(prepared.folder / "two.yaml", sources.folder)
    process = sources.run("python", "scripts/kubernetes_job.py", "output/sft/tiny", *two_nodes)
    assert (process.returncode, process.stdout) == (
        1,
        "error: the inputs of train_sft tiny are missing: first run snakemake --profile kubernetes"
        " output/models/tiny.manifest.json output/tokens/sft/tiny.manifest.json"
        " --configfile two.yaml\n",
    )
