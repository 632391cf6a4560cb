"""The lineage of a result: every upstream job, back to the sources.

Each manifest contains its whole lineage, so that a checkpoint that was copied elsewhere still has
it. A lineage is a dict of jobs by path: rule, name, settings, facts (a commit, rows dropped),
number and digest of the external files, digest of the spec, digest of the content, and the paths of
the inputs.

A lineage is what a result was really made from: it stays if an upstream job is done again from
another spec and yields the same content.

Standard library only: the workflow imports this module while it plans.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from snakechat.workflow.digests import digest
from snakechat.workflow.manifest import content_digest

Lineage = dict[str, dict[str, Any]]


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
        spec = manifest["spec"]
        jobs[spec["path"]] = {
            "rule": spec["rule"],
            "name": spec["name"],
            "settings": spec["settings"],
            "facts": manifest["facts"],
            "files": {"number": len(spec["files"]), "digest": digest(spec["files"])},
            "spec": digest(spec),
            "content": content_digest(manifest),
            "inputs": sorted({entry["path"] for entry in spec["inputs"].values()}),
        }
        if "accepted" in manifest:
            jobs[spec["path"]]["accepted"] = manifest["accepted"]
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
