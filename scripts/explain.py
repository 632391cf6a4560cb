"""Explain why results are stale: what changed since each was made, and what that makes stale.

    python scripts/explain.py output/rlhf/1.3b
    python scripts/explain.py output/rlhf/mine --configfile mine.yaml --config seed=2
    python scripts/explain.py --hub output/rlhf/1.3b

Without targets, explains all results that exist. Manifests record what results were made from; the
config, with the options of Snakemake, says what they would be made from now. Builds and writes
nothing.

With --hub, print instead which branches of the Hugging Face Hub have moved since the results were
made. This needs a connection.
"""

import argparse
import sys
from collections.abc import Sequence

from snakechat.planning.changes import job_name
from snakechat.planning.plan import Plan, upstream_paths
from snakechat.planning.planner import plan_build
from snakechat.planning.stale_causes import NEVER_BUILT, causes_of
from snakechat.workflow.lineage import Lineage, merge_lineages
from snakechat.workflow.manifest import manifest_path, read_manifest
from snakechat.workflow.tool_errors import one_line_errors


@one_line_errors()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [--hub] [targets and options of snakemake]",
        allow_abbrev=False,
    )
    parser.add_argument("--hub", action="store_true", help="ask the hub which branches have moved")
    arguments, words = parser.parse_known_args()
    if arguments.hub:
        print_moved_branches(words)
        return
    plan = plan_build(words)
    if not plan.stale:
        verb = "is" if len(plan.targets) == 1 else "are"
        print(f"{', '.join(plan.targets) or 'all results'} {verb} up to date")
    groups: dict[tuple[str, ...], list[str]] = {}
    for path, job in plan.stale_jobs.items():
        causes = tuple(causes_of(job.spec, plan.stale))
        # Jobs that are stale because of upstream jobs alone are listed with those.
        if causes:
            groups.setdefault(causes, []).append(path)
    for causes, roots in groups.items():
        print_group(causes, roots, plan)


def print_moved_branches(targets: Sequence[str]) -> None:
    """Print which branches have moved since the sources of results were fetched."""
    # The client of the hub takes a second to import.
    from snakechat.data.hub import moved_branches

    sources: Lineage = {}
    for target in targets:
        manifest = read_manifest(manifest_path(target.removesuffix(".manifest.json")))
        if manifest is None:
            sys.exit(f"error: {target} has no result: build it first")
        sources |= merge_lineages([manifest])
    lines = moved_branches((entry, entry["facts"]) for entry in sources.values())
    print("\n".join(lines) or "no branch has moved")


def print_group(causes: Sequence[str], roots: Sequence[str], plan: Plan) -> None:
    """Print why jobs with the same causes are stale, and their downstream jobs.

    Args:
        causes: Their causes.
        roots: The paths of their results.
        plan: All jobs.
    """
    jobs = plan.stale_jobs
    reached = dict.fromkeys(roots)
    for path, job in jobs.items():
        if not reached.keys().isdisjoint(upstream_paths(job.spec, jobs)):
            reached.setdefault(path)
    first, *names = (job_name(jobs[path].spec) for path in reached)
    others, downstream = names[: len(roots) - 1], names[len(roots) - 1 :]
    if causes == (NEVER_BUILT,):
        print(f"{first} {NEVER_BUILT}")
    elif len(causes) == 1:
        print(f"{first} is stale: {causes[0]}")
    else:
        print(f"{first} is stale:", *causes, sep="\n  ")
    if others:
        print(f"  the same applies to: {', '.join(others)}")
    if downstream:
        # A job whose inputs come out with the same content keeps its result.
        print(f"  makes stale if the content changes: {', '.join(downstream)}")


if __name__ == "__main__":
    main()
