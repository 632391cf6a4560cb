"""Explain why results are stale: what changed since each was made, and what that makes stale.

    python scripts/explain.py output/rlhf/1.3b
    python scripts/explain.py output/rlhf/mine --configfile mine.yaml --config seed=2

Without targets, explains all results that exist. Manifests record what results were made from; the
config, with the options of Snakemake, says what they would be made from now. Builds and writes
nothing.
"""

from collections.abc import Iterable, Sequence

from snakechat.jobs.planner import plan_build, plan_parser
from snakechat.jobs.stale_causes import NEVER_BUILT, causes_of, job_name
from snakechat.jobs.staleness import PlannedJob
from snakechat.workflow.errors import one_line_errors


@one_line_errors()
def main() -> None:
    plan = plan_build(plan_parser(__doc__).parse_known_args()[1])
    if not plan.stale:
        verb = "is" if len(plan.targets) == 1 else "are"
        print(f"{', '.join(plan.targets) or 'all results'} {verb} up to date")
    groups: dict[tuple[str, ...], list[PlannedJob]] = {}
    for job in plan.stale.values():
        causes = tuple(causes_of(job.spec, plan.configfiles, plan.stale))
        # Jobs that are stale because of upstream jobs alone are listed with those.
        if causes:
            groups.setdefault(causes, []).append(job)
    for causes, roots in groups.items():
        print_group(causes, roots, plan.stale.values())


def print_group(
    causes: Sequence[str], roots: Sequence[PlannedJob], jobs: Iterable[PlannedJob]
) -> None:
    """Print why jobs with the same causes are stale, and which of all jobs are downstream."""
    reached = dict.fromkeys(roots)
    for job in jobs:
        if not reached.keys().isdisjoint(job.inputs.values()):
            reached.setdefault(job)
    first, *names = (job_name(job.spec) for job in reached)
    others, downstream = names[: len(roots) - 1], names[len(roots) - 1 :]
    start = first if causes == (NEVER_BUILT,) else f"{first} is stale:"
    print(start, *causes, sep=" " if len(causes) == 1 else "\n  ")
    if others:
        print(f"  the same applies to: {', '.join(others)}")
    if downstream:
        # A job whose inputs come out with the same content keeps its result.
        print(f"  makes stale if the content changes: {', '.join(downstream)}")


if __name__ == "__main__":
    main()
