"""What earlier runs on a GPU took, next to their estimates, which corrects the hours of later jobs.

run.json of a result has the time, GPU and placement of a run; its manifest has its spec.
"""

import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from snakechat.planning.compute_time import Gpu
from snakechat.planning.flops import gpu_kind
from snakechat.planning.job_estimate import JobEstimate
from snakechat.planning.plan import Plan, PlannedJob
from snakechat.workflow.digests import digest
from snakechat.workflow.manifest import manifest_path, read_manifest
from snakechat.workflow.placement import placement_of
from snakechat.workflow.run_record import read_run_record

ENDING = ".manifest.json"


class PastRun(NamedTuple):
    """An earlier run: what it took and what is estimated for it.

    job: Rule and name. seconds: Of the whole job. peak: Bytes of tensors of the first GPU.
    """

    rule: str
    job: str
    seconds: float
    estimated_seconds: float
    peak: float
    estimated_peak: float

    @property
    def factor(self) -> float:
        """Measured over estimated time."""
        return self.seconds / self.estimated_seconds


def past_runs(output: Path, gpu: Gpu) -> list[PastRun]:
    """Return the runs on a kind of GPU whose results are in a folder, by path.

    Runs that were resumed are omitted, because their records have the time since then; and those
    whose upstream results do not exist any more, as they have no estimate.
    """
    jobs: dict[str, PlannedJob] = {}
    measured = {}
    for path in sorted(output.glob(f"[!.]*/**/*{ENDING}")):
        result = str(path).removesuffix(ENDING)
        manifest = read_manifest(manifest_path(result))
        run = manifest and read_run_record(result, digest(manifest["spec"]))
        if not manifest or not run:
            continue
        jobs[result] = PlannedJob(manifest["spec"], placement_of(run["placement"]))
        if (
            gpu.name
            and gpu_kind(run.get("gpu", "")) == gpu.name
            and not run.get("resumed_after_step")
        ):
            measured[result] = run
    plan = Plan(jobs, set())
    return [
        PastRun(
            jobs[result].spec["rule"],
            str(job),
            run["seconds"],
            job.seconds,
            run["peak_gpu_memory_mb"] << 20,
            sum(job.memory.values()),
        )
        for result, run in measured.items()
        for job in _estimated(result, plan, gpu)
        if job.seconds and job.memory
    ]


def _estimated(path: str, plan: Plan, gpu: Gpu) -> Iterator[JobEstimate]:
    """Yield the estimate of a job, unless results that it was made from are missing."""
    upstream = [path]
    for each in upstream:
        if each not in plan.jobs:
            return
        upstream += [entry["path"] for entry in plan.jobs[each].spec["inputs"].values()]
    yield JobEstimate(path, plan, gpu)


def correction_factors(runs: Iterable[PastRun]) -> dict[str, float]:
    """Return the median factor of the runs of each rule."""
    factors: dict[str, list[float]] = {}
    for run in runs:
        factors.setdefault(run.rule, []).append(run.factor)
    return {rule: statistics.median(values) for rule, values in factors.items()}
