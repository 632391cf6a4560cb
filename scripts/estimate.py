"""Estimate a build before it starts: GPU memory, hours, disk, and what does not fit.

    python scripts/estimate.py output/rlhf/13b
    python scripts/estimate.py output/rlhf/mine --gpu h100 --configfile mine.yaml
    python scripts/estimate.py output/rlhf/mine --gpu 48,181,864

Plans the jobs and placements of a build with the same targets and options of Snakemake; without
targets, of all results that exist. Builds nothing, and downloads nothing but config.json of models
of the Hub. The modules in snakechat/estimates/ describe the method.
"""

import math
from collections.abc import Sequence

from snakechat.estimates.flops import GPU_SYNTAX, GPUS, parse_gpu
from snakechat.estimates.job_estimate import (
    BANDWIDTH_UTILIZATION,
    COMPONENTS,
    FLOPS_UTILIZATION,
    GIB,
    JobEstimate,
    format_bytes,
)
from snakechat.jobs.planner import plan_build, plan_parser
from snakechat.workflow.errors import one_line_errors

COLUMNS = ("job", "state", "GPUs", *COMPONENTS, "total", "at", "disk", "hours")
# Checkpoints that exist at the same time: the last two, and the one that is being written.
CHECKPOINTS = 3


@one_line_errors()
def main() -> None:
    """Plan the build and print the estimates of its jobs."""
    parser = plan_parser(__doc__, "[--gpu GPU] ")
    parser.add_argument(
        "--gpu",
        default="a100-80g",
        help=f"{', '.join(GPUS)} or {GPU_SYNTAX}: its memory, its dense 16-bit TFLOPS and the"
        " bandwidth of its memory; default: %(default)s",
    )
    arguments, words = parser.parse_known_args()
    try:
        gpu = parse_gpu(arguments.gpu)
    except ValueError as error:
        parser.error(f"argument --gpu: {error}")

    plan = plan_build(words)
    jobs = [JobEstimate(path, plan, gpu) for path in plan.jobs]
    print(
        f"{arguments.gpu}: {gpu.memory / GIB:.0f} GiB, {gpu.flops / 1e12:.0f} TFLOPS in 16 bits,"
        f" {gpu.bandwidth / 1e12:.2f} TB/s; assumed utilization: {FLOPS_UTILIZATION:.0%} of the"
        f" TFLOPS, {BANDWIDTH_UTILIZATION:.0%} of the"
        " bandwidth"
    )
    print(format_table([COLUMNS, *map(table_row, jobs)]))
    for job in jobs:
        for warning in job.warnings:
            print(f"warning: {job}: {warning}")
    for note, names in jobs_by_note(jobs).items():
        print(f"{note} ({', '.join(names)})")
    print(summary(jobs))


def table_row(job: JobEstimate) -> tuple[str, ...]:
    """Return the cells of a job, one for each column."""
    components = [job.memory.get(name, 0) for name in COMPONENTS]
    sizes = [format_bytes(size) if size else "" for size in (*components, sum(components))]
    return (
        str(job),
        "stale" if job.stale else "up to date",
        str(job.num_gpus or ""),
        *sizes,
        job.moment,
        "?" if math.isnan(job.disk) else format_bytes(job.disk),
        format_number(job.seconds / 3600),
    )


def jobs_by_note(jobs: Sequence[JobEstimate]) -> dict[str, list[str]]:
    """Return the names of the jobs to which each note applies."""
    names: dict[str, list[str]] = {}
    for job in jobs:
        for note in job.notes:
            names.setdefault(note, []).append(str(job))
    return names


def summary(jobs: Sequence[JobEstimate]) -> str:
    """Return the totals of the stale jobs."""
    stale = [job for job in jobs if job.stale]
    on_gpus = [job for job in stale if job.num_gpus]
    hours = [job.num_gpus * job.seconds / 3600 for job in on_gpus if not math.isnan(job.seconds)]
    disk = [job.disk for job in stale if not math.isnan(job.disk)]
    checkpoints = [CHECKPOINTS * job.checkpoint for job in stale]
    at_least = "at least " if len(hours) < len(on_gpus) else ""
    return (
        f"{len(stale)} of {len(jobs)} jobs are stale: {at_least}{sum(hours):,.1f} GPU hours,"
        f" {format_bytes(sum(disk))} of disk for results of known size, and up to"
        f" {format_bytes(max(checkpoints, default=0))} for the checkpoints of a training job"
    )


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as text. The first row has the headings; columns without entries are dropped."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for cells in zip(*columns, strict=True):
        first, *others = zip(cells, widths, strict=True)
        aligned = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def format_number(number: float) -> str:
    """Format a number with about two digits; empty if it is unknown."""
    if math.isnan(number):
        return ""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


if __name__ == "__main__":
    main()
