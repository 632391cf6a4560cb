"""Why a result that exists is stale: what its manifest records, compared with the job of today."""

import json
import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from snakechat.planning.changes import (
    changed_settings,
    job_name,
    replaced_inputs,
    spec_changes,
    summarize,
)
from snakechat.workflow.lineage import Lineage, merge_lineages
from snakechat.workflow.manifest import (
    MANIFEST,
    Manifest,
    input_digest,
    manifest_path,
    read_manifest,
)
from snakechat.workflow.printable import printable_line
from snakechat.workflow.spec_files import spec_path

NEVER_BUILT = "has never been built"


class Changes(NamedTuple):
    """What changed since a result was made.

    Attributes:
        own: Changes of the job and of its result.
        inputs: Inputs that were rebuilt with other content, or come from other jobs.
        reported: All changes of inputs. Those that a changed setting explains are not in `inputs`.
    """

    own: list[str]
    inputs: list[str]
    reported: set[str]


def causes_of(spec: dict[str, Any]) -> list[str]:
    """Describe why the result of a job is stale.

    Args:
        spec: The spec of today.
    """
    found = find_changes(spec, "", ())
    return list(map(printable_line, found.own + found.inputs)) or ["made from other inputs"]


def find_changes(spec: dict[str, Any], source: str, planned: Container[str]) -> Changes:
    """Describe what changed since a result was made.

    Args:
        spec: The spec of today.
        source: Folder of the external files, to count the rows that they have now.
        planned: Paths of the results that will be rebuilt.
    """
    manifest, own = recorded_manifest(spec["path"])
    if manifest is None:
        return Changes(own, [], set())
    recorded = manifest["spec"]
    own += spec_changes(recorded, spec, manifest.get("facts", {}), source)
    own += damaged_files(spec["path"], manifest["files"])
    rebuilt = rebuilt_inputs(manifest, spec, planned)
    replaced = replaced_inputs(recorded, spec)
    # A changed setting explains by itself why the job reads other inputs.
    inputs = rebuilt if changed_settings(recorded, spec) else rebuilt + replaced
    return Changes(own, inputs, {*rebuilt, *replaced})


def recorded_manifest(path: str) -> tuple[Manifest | None, list[str]]:
    """Return the manifest of a result, if any, and what is wrong with the result."""
    manifest_file = Path(path, MANIFEST)
    if manifest := read_manifest(manifest_file):
        return manifest, []
    if manifest_file.exists():
        problem = f"{manifest_file} cannot be read"
    elif os.path.lexists(path):
        problem = f"{path} is missing"
    else:
        problem = NEVER_BUILT
    return None, [problem]


def damaged_files(path: str, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Describe the files of a result that are missing or differ in size from its manifest."""
    if not Path(path).is_dir():
        return [f"{path} is missing"]
    sizes = {name: file_size(Path(path, name)) for name in files}

    def describe(name: str) -> str:
        if sizes[name] is None:
            return f"{path}/{name} is missing"
        return f"{path}/{name} changed size ({files[name]['size']:,} -> {sizes[name]:,} bytes)"

    names = [name for name in files if sizes[name] != files[name]["size"]]
    return summarize(names, describe, f"{path}: {{}} more files are missing or changed size")


def file_size(path: Path) -> int | None:
    """Return the bytes of a file, or None if it does not exist."""
    return path.stat().st_size if path.is_file() else None


def rebuilt_inputs(manifest: Manifest, spec: dict[str, Any], planned: Container[str]) -> list[str]:
    """Describe the inputs that were rebuilt with other content since a result was made."""
    changes: dict[str, None] = {}
    for key, entry in spec["inputs"].items():
        recorded = manifest["spec"]["inputs"].get(key)
        current = read_manifest(manifest_path(entry["path"]))
        if entry["path"] in planned or recorded != entry or current is None:
            continue
        if input_digest(spec, current) != manifest["inputs"].get(key):
            versions = manifest["lineage"], merge_lineages([current])
            changes |= dict.fromkeys(rebuild_causes(entry["path"], *versions))
    return list(changes)


def rebuild_causes(path: str, old: Lineage, new: Lineage) -> list[str]:
    """Describe what changed before an upstream job was done again.

    Args:
        path: Path of its result.
        old, new: The lineages that contain its two versions.
    """
    job, before = new[path], old.get(path)
    rebuilt = f"{job_name(job)} was rebuilt"
    if before is None:
        return [rebuilt]
    if before["spec"] != job["spec"]:
        changes = recorded_changes(before, job)
        return [f"{rebuilt}: {'; '.join(changes)}" if changes else rebuilt]
    causes: dict[str, None] = {}
    for upstream in job["inputs"]:
        if old.get(upstream, {}).get("content") != new[upstream]["content"]:
            causes |= dict.fromkeys(rebuild_causes(upstream, old, new))
    return list(causes) or [f"{rebuilt} with other content"]


def recorded_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the differences of two versions of a job, if the spec files of both exist.

    before, now: its entries in two lineages.
    """
    try:
        old, new = (
            json.loads(spec_path(job["rule"], job["name"], job["spec"]).read_text())
            for job in (before, now)
        )
    except FileNotFoundError:
        return []
    return spec_changes(old, new, {}) + replaced_inputs(old, new)
