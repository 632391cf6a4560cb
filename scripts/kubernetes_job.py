"""Write the trainings of a build that take several GPUs or nodes as jobs of Kubeflow.

    python scripts/kubernetes_job.py output/sft/66b | kubectl create --filename -
    python scripts/kubernetes_job.py output/sft/mine --kind TrainJob -- --configfile mine.yaml

A pod of Snakemake's own is on one node of the cluster, and has little shared memory. Each node of
these runs the same program with the same spec file, so that Snakemake then finds the result fresh.
Image and volume are those of the profile (profiles/kubernetes). Trainings whose inputs are not
there yet are left for later; if that is all, it says what to build first. Nothing is built, and
only spec files are written.
"""

import argparse
import json
import os
import re
import shlex
import sys
from pathlib import Path

import yaml

from snakechat.planning.changes import job_name
from snakechat.planning.dry_run import parse_arguments, upstream_paths, dry_run, planned_jobs
from snakechat.workflow.digests import digest
from snakechat.workflow.manifest import manifest_path

ROOT = Path(__file__).resolve().parent.parent
PROFILE = ROOT / "profiles/kubernetes/config.yaml"
# Seconds that pods have to save when they are asked to stop.
TO_SAVE = 3600
# Attempts after the first.
RETRIES = 2
# Of the Trainer's kinds and labels.
GROUP = "trainer.kubeflow.org"


def main():
    """Plan, choose, write."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [--kind KIND] target [target ...] [-- options of snakemake]",
    )
    parser.add_argument("targets", nargs="+", help="as for snakemake")
    parser.add_argument(
        "--kind",
        choices=KINDS,
        default="PyTorchJob",
        help="of Kubeflow's Training Operator (PyTorchJob) or Trainer 2 (TrainJob)",
    )
    arguments, options = parse_arguments(parser, sys.argv[1:])
    folder, plan = dry_run([*arguments.targets, *options])
    os.chdir(folder)
    jobs = planned_jobs(plan)
    trainings = [job for job in jobs.values() if job.spec["rule"].startswith("train_")]
    several = [job for job in trainings if processes(job) > 1]
    if not several:
        targets = ", ".join(arguments.targets)
        sys.exit(f"error: {targets}: no training to run takes several GPUs or nodes")
    ready = [job for job in several if not upstream_paths(job.spec, jobs)]
    if not ready:
        inputs = [str(manifest_path(path)) for path in upstream_paths(several[0].spec, jobs)]
        build = shlex.join(["snakemake", "--profile", "kubernetes", *inputs, *options])
        sys.exit(f"error: {job_name(several[0].spec)} has inputs to build first: {build}")
    profile = yaml.safe_load(PROFILE.read_text())
    documents = [
        document for job in ready for document in KINDS[arguments.kind](job, folder, profile)
    ]
    print(yaml.safe_dump_all(documents, sort_keys=False), end="")


def processes(job):
    """How many a training has: one for each GPU, or for each node without."""
    return job.placement["nodes"] * max(job.placement["gpus_per_node"], 1)


def pytorch_job(job, folder, profile):
    """Of the Training Operator: a master, the first node, and workers."""
    template = {"spec": pod(job, folder, profile, "pytorch")}
    nodes = {"Master": 1, "Worker": job.placement["nodes"] - 1}
    yield {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata(job, profile),
        "spec": {
            "nprocPerNode": str(max(job.placement["gpus_per_node"], 1)),
            "runPolicy": {"backoffLimit": RETRIES, "cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": {
                kind: {"replicas": number, "restartPolicy": "OnFailure", "template": template}
                for kind, number in nodes.items()
                if number
            },
        },
    }


def train_job(job, folder, profile):
    """Of the Trainer: a runtime, which says what a node does, and the job that names it."""
    nodes = job.placement["nodes"]
    # One that fails ends the others: after that, all start anew.
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {f"{GROUP}/trainjob-ancestor-step": "trainer"}},
            "spec": {
                "backoffLimit": 0,
                "template": {
                    "spec": {**pod(job, folder, profile, "node"), "restartPolicy": "Never"}
                },
            },
        },
    }
    yield {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata(job, profile),
        "spec": {
            "mlPolicy": {"numNodes": nodes, "torch": {}},
            "template": {
                "spec": {"failurePolicy": {"maxRestarts": RETRIES}, "replicatedJobs": [node]}
            },
        },
    }
    runtime = {"apiGroup": GROUP, "kind": "TrainingRuntime", "name": object_name(job)}
    yield {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(job, profile),
        "spec": {"runtimeRef": runtime, "trainer": {"numNodes": nodes}},
    }


KINDS = {"PyTorchJob": pytorch_job, "TrainJob": train_job}


def metadata(job, profile):
    """The name of a job's objects, and where they are."""
    return {"name": object_name(job), "namespace": profile["kubernetes-namespace"]}


def object_name(job):
    """A name that Kubernetes takes, the same for the same spec: no job runs twice beside itself."""
    name = re.sub("[^a-z0-9]+", "-", f"{job.spec['rule']}-{job.spec['name']}".lower())
    return f"{name[:40].strip('-')}-{digest(job.spec)[:8]}"


def pod(job, folder, profile, name):
    """What runs on each node. name: what the operator calls the container that trains."""
    where = job.placement
    claim, path = profile["kubernetes-persistent-volumes"][0].split(":")
    if not Path(folder).is_relative_to(path):
        sys.exit(f"error: {folder} is not on the volume, which pods have at {path} ({PROFILE})")
    threads, gpus = where["threads"], where["gpus_per_node"]
    limits = {"cpu": str(threads), "memory": f"{where['mem_mb']}M"}
    if gpus:
        limits["nvidia.com/gpu"] = str(gpus)
    container = {
        "name": name,
        "image": profile["container-image"],
        "workingDir": folder,
        "command": command(job),
        # A node keeps some of its CPU for itself.
        "resources": {"requests": {**limits, "cpu": f"{950 * threads}m"}, "limits": limits},
        "volumeMounts": [
            {"name": "volume", "mountPath": path},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "terminationGracePeriodSeconds": TO_SAVE,
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "containers": [container],
        "volumes": [
            {"name": "volume", "persistentVolumeClaim": {"claimName": claim}},
            # NCCL's buffers: a container's own 64 MB are too few. It counts as memory of the pod.
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }


def command(job):
    """What Snakemake would run, as a list of words."""
    spec = job.spec
    planned = f"output/specs/{spec['rule']}/{spec['name']}-{digest(spec)[:16]}.json"
    programs = [os.path.relpath(ROOT / f"scripts/{name}.py") for name in ("launch", spec["rule"])]
    placement = json.dumps(job.placement, sort_keys=True)
    return ["python", *programs, "--spec", planned, "--placement", placement]


if __name__ == "__main__":
    main()
