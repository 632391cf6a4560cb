"""The lineage of a result: every upstream job, back to the sources.

Each manifest contains its whole lineage, so that a checkpoint that was copied elsewhere still has
it. A lineage is a dict of jobs by RULE/KEY: rule, settings, facts (a commit, rows dropped), number
and digest of the external files, digest of the spec, digest of the content, and the RULE/KEY of
each input. Pages show it with names (`named_lineage`).

A lineage is what a result was really made from: it stays if an upstream job is done again from
another spec and yields the same content.

Standard library only: the workflow imports this module while it plans.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from snakechat.workflow.digests import digest
from snakechat.workflow.manifest import content_digest, result_id

Lineage = dict[str, dict[str, Any]]
# The paths of the inputs of each job by the names in its spec, by the path of the job.
Names = Mapping[str, Mapping[str, str]]


def merge_lineages(manifests: Iterable[Mapping[str, Any]]) -> Lineage:
    """Return the lineage of a job, given the manifests of its inputs.

    Two inputs may have been made from different versions of an upstream job with the same content;
    an input of the job itself is listed as it is.
    """
    manifests = list(manifests)
    jobs: Lineage = {}
    for manifest in manifests:
        jobs |= manifest["lineage"]
    for manifest in manifests:
        spec, result = manifest["spec"], result_id(manifest)
        jobs[result] = {
            "rule": spec["rule"],
            "settings": spec["settings"],
            "facts": manifest["facts"],
            "files": {"number": len(spec["files"]), "digest": digest(spec["files"])},
            "spec": digest(spec),
            "content": content_digest(manifest),
            "inputs": {key: entry["result"] for key, entry in manifest["inputs"].items()},
        }
        if "accepted" in manifest:
            jobs[result]["accepted"] = manifest["accepted"]
    return jobs


def named_lineage(results: Mapping[str, str], lineage: Lineage, names: Names) -> Lineage:
    """Return a lineage by paths: each job has its name, and its inputs as a list of paths.

    A job that the config of today names no more has its RULE/KEY in place of a path.

    Args:
        results: The RULE/KEY of results by their paths.
        lineage: These results and all jobs before them.
        names: The paths of today.
    """
    jobs: Lineage = {}
    pending = list(results.items())
    while pending:
        path, result = pending.pop()
        if path in jobs:
            continue
        job, paths = lineage[result], names.get(path, {})
        inputs = {paths.get(key, upstream): upstream for key, upstream in job["inputs"].items()}
        jobs[path] = {**job, "name": path.rpartition("/")[2], "inputs": sorted(inputs)}
        pending += inputs.items()
    return jobs


def upstream_first(jobs: Lineage) -> list[str]:
    """Return the paths of a lineage: each job follows all its inputs, those without any first."""
    depths: dict[str, int] = {}

    def depth(path: str) -> int:
        if path not in depths:
            depths[path] = 1 + max(map(depth, jobs[path]["inputs"]), default=0)
        return depths[path]

    for path in sorted(jobs):
        depth(path)
    return sorted(depths, key=depths.__getitem__)
