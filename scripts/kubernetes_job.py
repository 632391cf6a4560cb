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

import json
import os
import re
import shlex
from pathlib import Path
from string import Template
from typing import Any

import yaml

from snakechat.jobs.planner import plan_build, plan_parser
from snakechat.jobs.stale_causes import job_name
from snakechat.jobs.staleness import PlannedJob
from snakechat.workflow.errors import InputError, one_line_errors
from snakechat.workflow.manifest import digest

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
    documents = completed(DRIVER, profile) if arguments.driver else pytorch_jobs(words, profile)
    print(yaml.safe_dump_all(documents, sort_keys=False), end="")


def completed(path: Path, profile: Document, **values: Any) -> list[Document]:
    """Return the documents of a file, with values in place of $NAME.

    The profile sets namespace, image, claim and mount. Further values come from the caller, such as
    the `folder` in which a pod starts. Raises InputError if the folder is not on the volume.
    """
    claim, _, mount = profile["kubernetes-persistent-volumes"][0].partition(":")
    folder = values.get("folder", mount)
    if not Path(folder).is_relative_to(mount):
        raise InputError(
            f"{folder} is not on the volume, which pods mount at {mount} ({PROFILE}): build in a"
            " folder on the volume"
        )
    values |= {"claim": claim, "mount": mount, "cache": f"{mount}/huggingface"}
    values |= {"namespace": profile["kubernetes-namespace"], "image": profile["container-image"]}
    text = {name: json.dumps(value) for name, value in values.items()}
    return list(yaml.safe_load_all(Template(path.read_text()).safe_substitute(text)))


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
    name = re.sub("[^a-z0-9]+", "-", f"{spec['rule']}-{spec['name']}".lower())[:40].strip("-")
    [document] = completed(
        TRAINING,
        profile,
        # The same for the same spec, so that no job runs twice.
        name=f"{name}-{digest(spec)[:8]}",
        workers=placement.nodes - 1,
        processes=str(max(gpus, 1)),
        gpus=str(gpus),
        cpu=str(threads),
        # A node reserves some of its CPU for the system.
        requested_cpu=f"{950 * threads}m",
        memory=f"{placement.mem_mb}M",
        folder=os.getcwd(),
        # The command that Snakemake would run.
        command=["python", *job.command(os.path.relpath(ROOT / "scripts"), placement)],
    )
    nodes = document["spec"]["pytorchReplicaSpecs"]
    if not gpus:
        # A cluster without GPUs need not have this resource.
        for amounts in nodes["Master"]["template"]["spec"]["containers"][0]["resources"].values():
            amounts.pop("nvidia.com/gpu", None)
    if placement.nodes == 1:
        del nodes["Worker"]
    job.write_spec()
    return document


if __name__ == "__main__":
    main()
