"""Write the jobs of a build that take several GPUs or nodes for Kubeflow's Training Operator.

    python scripts/kubernetes_job.py output/sft/66b | kubectl create --filename -
    python scripts/kubernetes_job.py output/sft/mine --configfile mine.yaml
    python scripts/kubernetes_job.py --driver | kubectl apply --filename -

profiles/kubernetes/config.yaml sets namespace, image, claim and mount, also of the driver, the pod
in which Snakemake runs, and training.yaml the rest of a pod. Each node of a PyTorchJob runs the
same program with the same spec file, so that Snakemake finds the result up to date afterwards. Jobs
with missing inputs are skipped; if all are, an error names the command that builds the inputs.
Builds nothing and writes spec files only.
"""

import os
import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from snakechat.jobs.planner import plan_build, plan_parser
from snakechat.jobs.stale_causes import job_name
from snakechat.jobs.staleness import PlannedJob
from snakechat.workflow.errors import InputError, one_line_errors
from snakechat.workflow.manifest import canonical_json, digest
from snakechat.workflow.processes import changed_values

ROOT = Path(__file__).resolve().parent.parent
PROFILE = ROOT / "profiles/kubernetes/config.yaml"
DRIVER, TRAINING = (PROFILE.with_name(f"{name}.yaml") for name in ("driver", "training"))

Document = dict[str, Any]


@one_line_errors()
def main() -> None:
    parser = plan_parser(__doc__)
    parser.add_argument("--driver", action="store_true", help="write the driver instead of jobs")
    arguments, words = parser.parse_known_args()
    profile = yaml.safe_load(PROFILE.read_text())
    documents = driver(profile) if arguments.driver else pytorch_jobs(words, profile)
    print(yaml.safe_dump_all(documents, sort_keys=False), end="")


def driver(profile: Document) -> list[Document]:
    """Return driver.yaml with the namespace, image, claim and mount of the profile."""
    documents = list(yaml.safe_load_all(DRIVER.read_text()))
    for document in documents:
        for each in (document["metadata"], *document.get("subjects", [])):
            each["namespace"] = profile["kubernetes-namespace"]
    container = completed(documents[-1]["spec"]["template"]["spec"], profile)
    container["env"] = [{"name": "HF_HOME", "value": f"{container['workingDir']}/huggingface"}]
    return documents


def completed(pod: Document, profile: Document, folder: str | None = None) -> Document:
    """Complete a pod with the image and the volume of the profile; return its container.

    folder: Where it starts; without one, where the volume is mounted.

    Raises InputError if the folder is not on the volume.
    """
    claim, _, path = profile["kubernetes-persistent-volumes"][0].partition(":")
    if folder and not Path(folder).is_relative_to(path):
        raise InputError(
            f"{folder} is not on the volume, which pods mount at {path} ({PROFILE}): build in a"
            " folder on the volume"
        )
    [container], volume = pod["containers"], pod["volumes"][0]
    mounts = [{"name": volume["name"], "mountPath": path}, *container.get("volumeMounts", [])]
    container |= {"image": profile["container-image"], "workingDir": folder or path}
    container["volumeMounts"] = mounts
    volume["persistentVolumeClaim"] = {"claimName": claim}
    return container


def pytorch_jobs(words: list[str], profile: Document) -> list[Document]:
    """Return the jobs of `snakemake WORDS` that take several GPUs or nodes and have their inputs.

    Raises InputError if there are none.
    """
    plan = plan_build(words)
    stale = {*plan.stale.values()}
    parallel = [job for job in plan.stale.values() if job.placement.num_processes > 1]
    ready = [job for job in parallel if stale.isdisjoint(job.inputs.values())]
    if not parallel:
        targets = ", ".join(plan.targets) or "all results"
        raise InputError(f"{targets}: no job to run takes several GPUs or nodes")
    if not ready:
        first = parallel[0]
        inputs = [each.manifest for each in first.inputs.values() if each in stale]
        options = [word for word in words if word not in plan.targets]
        build = shlex.join(["snakemake", "--profile", "kubernetes", *inputs, *options])
        raise InputError(f"the inputs of {job_name(first.spec)} are missing: first run {build}")
    return [pytorch_job(job, profile) for job in ready]


def pytorch_job(job: PlannedJob, profile: Document) -> Document:
    """Return training.yaml for a job: a master (the first node) and workers. Writes its spec."""
    spec, placement = job.spec, job.placement
    threads, gpus = placement.threads, placement.gpus_per_node
    limits = {"cpu": str(threads), "memory": f"{placement.mem_mb}M"}
    limits |= {"nvidia.com/gpu": str(gpus)} if gpus else {}
    # A node reserves some of its CPU for the system.
    amounts = {"requests": {**limits, "cpu": f"{950 * threads}m"}, "limits": limits}
    document = yaml.safe_load(TRAINING.read_text())
    # The same for the same spec, so that no job runs twice.
    name = re.sub("[^a-z0-9]+", "-", f"{spec['rule']}-{spec['name']}".lower())[:40].strip("-")
    names = {"name": f"{name}-{digest(spec)[:8]}", "namespace": profile["kubernetes-namespace"]}
    document["metadata"] = {**document.get("metadata", {}), **names}
    document["spec"]["nprocPerNode"] = str(max(gpus, 1))
    nodes = document["spec"]["pytorchReplicaSpecs"]
    container = completed(nodes["Master"]["template"]["spec"], profile, os.getcwd())
    resources = container.get("resources", {})
    amounts = {kind: resources.get(kind, {}) | amounts[kind] for kind in amounts}
    container["resources"] = resources | amounts
    job.write_spec()
    # The command that Snakemake would run.
    programs = (os.path.relpath(ROOT / f"scripts/{each}.py") for each in ("launch", job.program))
    container["command"] = [
        *("python", *programs, "--spec", str(job.spec_file)),
        *("--placement", canonical_json(changed_values(placement))),
        *("--options", canonical_json(changed_values(job.options))),
    ]
    if placement.nodes > 1:
        nodes["Worker"] = {**nodes["Master"], "replicas": placement.nodes - 1}
    return document


if __name__ == "__main__":
    main()
