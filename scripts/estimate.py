"""Estimate a build before it starts: GPU memory, hours, disk, and what does not fit.

    python scripts/estimate.py output/rlhf/13b
    python scripts/estimate.py output/rlhf/mine --gpu h100 --configfile mine.yaml
    python scripts/estimate.py output/rlhf/mine --gpu 48GB,181TFLOPS,864GB/s
    python scripts/estimate.py output/rlhf/13b --price 1.90

Plans the jobs and placements of a build with the same targets and options of Snakemake. Builds and
writes nothing. Where output/ has results of runs on the same
kind of GPU, their time is printed beside its estimate and corrects the hours of jobs to come. The
modules in snakechat/planning/ describe the method.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from snakechat.planning.compute_time import (
    BANDWIDTH_UTILIZATION,
    FLOPS_UTILIZATION,
    GPU_SYNTAX,
    GPUS,
    parse_gpu,
)
from snakechat.planning.job_estimate import JobEstimate, format_bytes
from snakechat.planning.memory import COMPONENTS, GIB
from snakechat.planning.past_runs import PastRun, correction_factors, past_runs
from snakechat.planning.planner import plan_build
from snakechat.workflow.tool_errors import one_line_errors

COLUMNS = (
    *("job", "state", "GPUs", "weights", "trained"),
    *(*COMPONENTS, "total", "at", "disk", "PFLOP", "hours"),
)
# Checkpoints that exist at the same time: the last two, and the one that is being written.
CHECKPOINTS = 3


@one_line_errors()
def main() -> None:
    """Plan the build and print the estimates of its jobs."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [--gpu GPU] [--price PRICE] [--json]"
        " [targets and options of snakemake]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--gpu",
        default="a100-80g",
        help=f"{', '.join(GPUS)} or {GPU_SYNTAX}: its memory, its dense 16-bit TFLOPS and the"
        " bandwidth of its memory; default: %(default)s",
    )
    parser.add_argument(
        "--price", type=float, help="price of a GPU for an hour, in any currency, for the total"
    )
    parser.add_argument("--json", action="store_true", help="print bytes, FLOP and seconds as JSON")
    arguments, words = parser.parse_known_args()
    try:
        gpu = parse_gpu(arguments.gpu)
    except ValueError as error:
        parser.error(f"argument --gpu: {error}")

    plan = plan_build(words)
    jobs = [JobEstimate(path, plan, gpu) for path in plan.jobs]
    past = past_runs(Path("output"), gpu)
    correct(jobs, correction_factors(past))

    if arguments.json:
        print(json.dumps([job.as_json() for job in jobs], indent=1))
        return
    print(
        f"{arguments.gpu}: {gpu.memory / GIB:.0f} GiB, {gpu.flops / 1e12:.0f} TFLOPS in 16 bits,"
        f" {gpu.bandwidth / 1e12:.2f} TB/s; assumed utilization: {FLOPS_UTILIZATION:.0%} of the"
        f" TFLOPS, {BANDWIDTH_UTILIZATION:.0%} of the bandwidth"
    )
    print(format_table([COLUMNS, *map(table_row, jobs)]))
    for job in jobs:
        for warning in job.warnings:
            print(f"warning: {job}: {warning}")
    for note, names in jobs_by_note(jobs).items():
        print(f"{note} ({', '.join(names)})")
    for line in comparison(past):
        print(line)
    print(summary(jobs, arguments.price))


def table_row(job: JobEstimate) -> tuple[str, ...]:
    """Return the cells of a job, one for each column."""
    sizes, weights, trained = ["" for _ in (*COMPONENTS, "total")], "", ""
    if job.memory and job.workload:
        weights, trained = map(format_count, job.workload.num_weights())
        components = [job.memory[name] for name in COMPONENTS]
        sizes = [format_bytes(size) if size else "" for size in (*components, sum(components))]
    return (
        str(job),
        "stale" if job.stale else "up to date",
        str(job.num_gpus or ""),
        weights,
        trained,
        *sizes,
        job.moment or "",
        "?" if job.disk is None else format_bytes(job.disk),
        format_number(job.flops and job.flops / 1e15),
        format_number(job.seconds and job.seconds / 3600),
    )


def jobs_by_note(jobs: Sequence[JobEstimate]) -> dict[str, list[str]]:
    """Return the names of the jobs to which each note applies."""
    names: dict[str, list[str]] = {}
    for job in jobs:
        for note in job.notes:
            names.setdefault(note, []).append(str(job))
    return names


def correct(jobs: Sequence[JobEstimate], factors: Mapping[str, float]) -> None:
    """Multiply the hours of jobs by the factors of earlier runs of their rules."""
    for job in jobs:
        if job.seconds is not None and (factor := factors.get(job.spec["rule"])):
            job.seconds *= factor
            job.notes.append(f"hours x {factor:.2f}, as earlier runs of {job.spec['rule']}")


def comparison(runs: Sequence[PastRun]) -> list[str]:
    """Return a line for each earlier run: what was measured, and what is estimated for it."""
    return [
        f"measured: {run.job}: {format_number(run.seconds / 3600)} hours (estimated:"
        f" {format_number(run.estimated_seconds / 3600)}), {format_bytes(run.peak)} of a GPU"
        f" (estimated: {format_bytes(run.estimated_peak)})"
        for run in runs
    ]


def summary(jobs: Sequence[JobEstimate], price: float | None = None) -> str:
    """Return the totals of the stale jobs. price: of a GPU for an hour, in any currency."""
    stale = [job for job in jobs if job.stale]
    on_gpus = [job for job in stale if job.num_gpus]
    hours = [job.num_gpus * job.seconds / 3600 for job in on_gpus if job.seconds is not None]
    disk = [job.disk for job in stale if job.disk is not None]
    checkpoints = [CHECKPOINTS * job.workload.checkpoint_bytes() for job in stale if job.workload]
    at_least = "at least " if len(hours) < len(on_gpus) else ""
    cost = "" if price is None else f" ({sum(hours) * price:,.2f} at {price:g} each)"
    return (
        f"{len(stale)} of {len(jobs)} jobs are stale: {at_least}{sum(hours):,.1f} GPU hours{cost},"
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


def format_count(number: int) -> str:
    """Format a number of weights (13.0 B, 125.2 M); empty for 0."""
    if number == 0:
        return ""
    return f"{number / 1e9:,.1f} B" if number >= 1e9 else f"{number / 1e6:,.1f} M"


def format_number(number: float | None) -> str:
    """Format a number with about two digits; empty if it is unknown."""
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


if __name__ == "__main__":
    main()
