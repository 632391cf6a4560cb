"""Estimate a build before it starts: GPU memory, hours, disk, and what does not fit.

    python scripts/estimate.py output/rlhf/13b
    python scripts/estimate.py output/rlhf/mine --gpu h100 --configfile mine.yaml
    python scripts/estimate.py output/rlhf/mine --gpu 48,181,864

Plans the jobs that a build with the same targets and options of Snakemake would run; without
targets, of all results that exist. Builds nothing, and downloads nothing but config.json of models
of the Hub. The modules in snakechat/estimates/ describe the method.
"""

import math
from collections.abc import Sequence

from snakechat.estimates.flops import GPU_SYNTAX, GPUS, parse_gpu
from snakechat.estimates.job_estimate import (
    BANDWIDTH_UTILIZATION,
    FLOPS_UTILIZATION,
    GIB,
    JobEstimate,
)
from snakechat.jobs.planner import plan_build, plan_parser
from snakechat.workflow.errors import one_line_errors
from snakechat.workflow.store import format_size

# Of each line; the first column has the names of jobs.
COLUMNS = "{:{}}  {:>4}  {:>10}  {:>8}  {:>10}  {:>6}"
# Checkpoints that exist at the same time: the last two, and the one that is being written.
CHECKPOINTS = 3


@one_line_errors()
def main() -> None:
    """Plan the build and print the estimates of its jobs."""
    parser = plan_parser(__doc__, "[--gpu GPU] ")
    parser.add_argument(
        "--gpu",
        type=parse_gpu,
        default="a100-80g",
        help=f"{', '.join(GPUS)} or {GPU_SYNTAX}: its memory, its dense 16-bit TFLOPS and the"
        " bandwidth of its memory; default: %(default)s",
    )
    arguments, words = parser.parse_known_args()
    gpu, plan = arguments.gpu, plan_build(words)
    jobs = [JobEstimate(job, gpu) for job in plan.stale.values()]
    print(
        f"{gpu.name}: {gpu.memory / GIB:.0f} GiB, {gpu.flops / 1e12:.0f} TFLOPS in 16 bits,"
        f" {gpu.bandwidth / 1e12:.2f} TB/s; assumed utilization: {FLOPS_UTILIZATION:.0%} of the"
        f" TFLOPS, {BANDWIDTH_UTILIZATION:.0%} of the bandwidth"
    )
    width = max((len(str(job)) for job in jobs), default=0)
    for row in [("job", "GPUs", "memory", "at", "disk", "hours"), *map(cells, jobs)]:
        print(COLUMNS.format(row[0], width, *row[1:]).rstrip())
    for job in jobs:
        for warning in job.warnings:
            print(f"warning: {job}: {warning}")
    for note in dict.fromkeys(note for job in jobs for note in job.notes):
        print(f"{note} ({', '.join(str(job) for job in jobs if note in job.notes)})")
    print(f"{len(jobs)} of {len(plan.jobs)} jobs are stale: {summary(jobs)}")


def cells(job: JobEstimate) -> tuple[str, ...]:
    """Return the cells of a job, one for each column."""
    hours = job.seconds / 3600
    return (
        str(job),
        str(job.num_gpus or ""),
        format_size(job.memory.total()) if job.memory else "",
        job.moment,
        "?" if math.isnan(job.disk) else format_size(job.disk),
        "" if math.isnan(hours) else f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}",
    )


def summary(jobs: Sequence[JobEstimate]) -> str:
    """Return the totals of the jobs."""
    on_gpus = [job for job in jobs if job.num_gpus]
    hours = [job.num_gpus * job.seconds / 3600 for job in on_gpus if not math.isnan(job.seconds)]
    disk = sum(job.disk for job in jobs if not math.isnan(job.disk))
    checkpoints = CHECKPOINTS * max((job.checkpoint for job in jobs), default=0)
    return (
        f"{'at least ' if len(hours) < len(on_gpus) else ''}{sum(hours):,.1f} GPU hours,"
        f" {format_size(disk)} of disk for trained models, and up to {format_size(checkpoints)}"
        " for the checkpoints of a training job"
    )


if __name__ == "__main__":
    main()
