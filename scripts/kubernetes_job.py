"""Write the jobs of a build that take several GPUs or nodes for Kubeflow's Training Operator.

    python scripts/kubernetes_job.py output/sft/66b | kubectl create --filename -
    python scripts/kubernetes_job.py output/sft/mine --configfile mine.yaml
    python scripts/kubernetes_job.py --driver | kubectl apply --filename -

profiles/kubernetes/config.yaml sets namespace, image, claim and mount, also of the driver, the pod
in which Snakemake runs, and training.yaml the rest of a pod. Snakemake's own pods run on one node
and have little shared memory. Each node of a PyTorchJob runs the same program with the same spec
file, so that Snakemake finds the result up to date afterwards. Jobs with missing inputs are
skipped; if all are, an error names the command that builds the inputs. Builds nothing and writes
spec files only.
"""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml

from snakechat.jobs.planner import plan_build, plan_parser
from snakechat.jobs.stale_causes import job_name
from snakechat.jobs.staleness import PlannedJob
from snakechat.workflow.errors import one_line_errors
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
    if arguments.driver:
        print(yaml.safe_dump_all(driver(profile), sort_keys=False), end="")
        return
    plan = plan_build(words)
    folder = os.getcwd()
    parallel = [job for job in plan.stale.values() if job.placement.num_processes > 1]
    if not parallel:
        targets = ", ".join(plan.targets) or "all results"
        sys.exit(f"error: {targets}: no job to run takes several GPUs or nodes")
    stale = {*plan.stale.values()}
    ready = [job for job in parallel if stale.isdisjoint(job.inputs.values())]
    if not ready:
        first = parallel[0]
        inputs = [each.manifest for each in first.inputs.values() if each in stale]
        options = [word for word in words if word not in plan.targets]
        build = shlex.join(["snakemake", "--profile", "kubernetes", *inputs, *options])
        sys.exit(f"error: the inputs of {job_name(first.spec)} are missing: first run {build}")
    documents = [pytorch_job(job, folder, profile) for job in ready]
    print(yaml.safe_dump_all(documents, sort_keys=False), end="")


def driver(profile: Document) -> list[Document]:
    """Return driver.yaml with the namespace, image, claim and mount of the profile."""
    documents = list(yaml.safe_load_all(DRIVER.read_text()))
    _, path = volume_of(profile)
    for document in documents:
        for each in (document["metadata"], *document.get("subjects", [])):
            each["namespace"] = profile["kubernetes-namespace"]
    container = completed(documents[-1]["spec"]["template"]["spec"], path, profile)
    container["env"] = [{"name": "HF_HOME", "value": f"{path}/huggingface"}]
    return documents


def volume_of(profile: Document) -> tuple[str, str]:
    """Return the claim of the shared volume, and the path at which pods mount it."""
    claim, _, path = profile["kubernetes-persistent-volumes"][0].partition(":")
    return claim, path


def completed(pod: Document, folder: str, profile: Document) -> Document:
    """Complete a pod with the image and the volume of the profile; return its container.

    folder: Where it starts.
    """
    claim, path = volume_of(profile)
    [container], volume = pod["containers"], pod["volumes"][0]
    mounts = [{"name": volume["name"], "mountPath": path}, *container.get("volumeMounts", [])]
    container |= {"image": profile["container-image"], "workingDir": folder, "volumeMounts": mounts}
    volume["persistentVolumeClaim"] = {"claimName": claim}
    return container


def pytorch_job(job: PlannedJob, folder: str, profile: Document) -> Document:
    """Return training.yaml for a job: a master (the first node) and workers."""
    _, path = volume_of(profile)
    if not Path(folder).is_relative_to(path):
        sys.exit(
            f"error: {folder} is not on the volume, which pods mount at {path} ({PROFILE}): build"
            " in a folder on the volume"
        )
    placement = job.placement
    threads, gpus = placement.threads, placement.gpus_per_node
    limits = {"cpu": str(threads), "memory": f"{placement.mem_mb}M"}
    limits |= {"nvidia.com/gpu": str(gpus)} if gpus else {}
    document = yaml.safe_load(TRAINING.read_text())
    names = {"name": object_name(job), "namespace": profile["kubernetes-namespace"]}
    document["metadata"] = {**document.get("metadata", {}), **names}
    document["spec"]["nprocPerNode"] = str(max(gpus, 1))
    nodes = document["spec"]["pytorchReplicaSpecs"]
    container = completed(nodes["Master"]["template"]["spec"], folder, profile)
    container["command"] = command(job)
    # A node reserves some of its CPU for the system.
    requests = {**limits, "cpu": f"{950 * threads}m"}
    resources = container.setdefault("resources", {})
    for kind, amounts in (("requests", requests), ("limits", limits)):
        resources[kind] = {**resources.get(kind, {}), **amounts}
    if placement.nodes > 1:
        nodes["Worker"] = {**nodes["Master"], "replicas": placement.nodes - 1}
    return document


def object_name(job: PlannedJob) -> str:
    """Return a valid Kubernetes name, the same for the same spec, so that no job runs twice."""
    name = re.sub("[^a-z0-9]+", "-", f"{job.spec['rule']}-{job.spec['name']}".lower())
    return f"{name[:40].strip('-')}-{digest(job.spec)[:8]}"


def command(job: PlannedJob) -> list[str]:
    """Write the spec of a job; return the command that Snakemake would run."""
    names = ("launch", job.program)
    programs = [os.path.relpath(ROOT / f"scripts/{name}.py") for name in names]
    placement = canonical_json(changed_values(job.placement))
    options = canonical_json(changed_values(job.options))
    job.write_spec()
    words = ["python", *programs, "--spec", str(job.spec_file)]
    return [*words, "--placement", placement, "--options", options]


if __name__ == "__main__":
    main()
