"""Explain why results are stale: what changed since each was made, and what that makes stale.

    python scripts/explain.py output/rlhf/1.3b
    python scripts/explain.py output/rlhf/mine --configfile mine.yaml --config seed=2
    python scripts/explain.py --hub output/rlhf/1.3b

Manifests record what results were made from; the config, with the options of Snakemake after the
targets, says what they would be made from now. Builds and writes nothing.

With --hub, print instead which branches of the Hugging Face Hub have moved since the results were
made. This needs a connection.
"""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from snakechat.planning.changes import job_name
from snakechat.planning.plan import upstream_paths
from snakechat.planning.planner import parse_arguments, plan_build
from snakechat.planning.stale_causes import NEVER_BUILT, find_changes, recorded_changes
from snakechat.workflow.lineage import Lineage, merge_lineages
from snakechat.workflow.manifest import manifest_path, read_manifest
from snakechat.workflow.printable import printable_line
from snakechat.workflow.tool_errors import one_line_errors


@one_line_errors()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [targets ...] [options of snakemake]",
    )
    parser.add_argument(
        "targets", nargs="*", help="as for snakemake; defaults to all results that exist"
    )
    parser.add_argument("--hub", action="store_true", help="ask the hub which branches have moved")
    arguments, options = parse_arguments(parser, sys.argv[1:])
    targets = arguments.targets
    if arguments.hub:
        print_moved_branches(targets)
        return
    plan = plan_build(targets, options)
    jobs = {path: StaleJob(job.spec, job.options.source) for path, job in plan.stale_jobs.items()}
    if not jobs:
        verb = "is" if len(targets) == 1 else "are"
        print(f"{', '.join(targets) or 'all results'} {verb} up to date")
        for line in replaced_versions(targets):
            print(f"  {line}")
    groups: dict[tuple[str, ...], list[StaleJob]] = {}
    for job in jobs.values():
        find_causes(job, jobs)
        groups.setdefault(tuple(job.causes), []).append(job)
    # Jobs that are stale because of upstream jobs only are listed with those.
    groups.pop((), None)
    for causes, roots in groups.items():
        print_group(causes, roots, jobs)


def print_moved_branches(targets: list[str]) -> None:
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


def print_group(
    causes: tuple[str, ...], roots: list["StaleJob"], jobs: Mapping[str, "StaleJob"]
) -> None:
    """Print why jobs with the same causes are stale, and their downstream jobs."""
    first, *others = map(str, roots)
    causes = tuple(map(printable_line, causes))
    if causes == (NEVER_BUILT,):
        print(f"{first} {NEVER_BUILT}")
    elif len(causes) == 1:
        print(f"{first} is stale: {causes[0]}")
    else:
        print(f"{first} is stale:", *causes, sep="\n  ")
    if others:
        print(f"  the same applies to: {', '.join(others)}")
    reached = list(roots)
    for job in jobs.values():
        if job not in reached and any(upstream in reached for upstream in job.upstream(jobs)):
            reached.append(job)
    if downstream := reached[len(roots) :]:
        # A job whose inputs come out with the same content keeps its result.
        print(f"  makes stale if the content changes: {', '.join(map(str, downstream))}")


# --- stale jobs -------------------------------------------------------------------------------


class StaleJob:
    """A job that Snakemake would run.

    Attributes:
        spec: Its spec of today.
        source: Folder of its external files, if any.
        causes: Why it is stale, apart from its upstream jobs; set by find_causes.
        reported: Every cause found for it or its upstream jobs, so that none is printed twice.
    """

    def __init__(self, spec: dict[str, Any], source: str = "") -> None:
        self.spec = spec
        self.source = source
        self.causes: list[str] = []
        self.reported: set[str] = set()

    def __str__(self) -> str:
        return job_name(self.spec)

    def upstream(self, jobs: Mapping[str, "StaleJob"]) -> list["StaleJob"]:
        """Return those of its upstream jobs that would run."""
        return [jobs[path] for path in upstream_paths(self.spec, jobs)]


# --- causes -----------------------------------------------------------------------------------


def find_causes(job: StaleJob, jobs: Mapping[str, StaleJob]) -> None:
    """Set the causes of a job. Its upstream jobs must have theirs already."""
    upstream = job.upstream(jobs)
    job.reported = set().union(*(other.reported for other in upstream))
    found = find_changes(job.spec, job.source, jobs)
    job.causes = found.own + [cause for cause in found.inputs if cause not in job.reported]
    job.reported |= found.reported


def replaced_versions(targets: list[str]) -> list[str]:
    """Describe the jobs upstream of results that were done again since, with the same content."""
    lines: dict[str, None] = {}
    for target in targets:
        manifest = read_manifest(manifest_path(target.removesuffix(".manifest.json")))
        for path, recorded in manifest["lineage"].items() if manifest else ():
            if current := read_manifest(manifest_path(path)):
                [now] = merge_lineages([{**current, "lineage": {}}]).values()
                if now["spec"] != recorded["spec"] and now["content"] == recorded["content"]:
                    changes = "; ".join(recorded_changes(recorded, now))
                    line = f"{job_name(now)} was rebuilt with the same content"
                    lines[f"{line}: {changes}" if changes else line] = None
    return list(lines)


if __name__ == "__main__":
    main()
