"""Why a result is stale: what its manifest records, compared with the job of today."""

import json
import os
import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

from snakechat.workflow.manifest import (
    MANIFEST,
    input_digest,
    manifest_path,
    read_manifest,
    read_run_record,
)
from snakechat.workflow.printable import printable_line
from snakechat.workflow.store import result_damage

NEVER_BUILT = "has never been built"
Spec = Mapping[str, Any]

# Longer lists of changes are truncated to this number.
MAX_LISTED = 10


def causes_of(
    spec: dict[str, Any], files: Iterable[Path], planned: Container[str] = ()
) -> list[str]:
    """Describe why the result of a job is stale, apart from upstream jobs that will run.

    spec, files, planned: The spec of today, the config files that the command names, and the paths
        of the results that will be rebuilt.
    """
    path = spec["path"]
    file = Path(path, MANIFEST)
    manifest, folder = read_manifest(file), file.resolve().parent
    if manifest is None and file.exists():
        return [f"{file} cannot be read"]
    if manifest is None:
        return [f"{path} is missing" if os.path.lexists(path) else NEVER_BUILT]
    changes = spec_changes(manifest["spec"], spec)
    causes = changes and [*changes, *lacking_configfiles(folder, files)]
    if damage := result_damage(folder, digests=None):
        causes.append(f"{path}: {damage}")
    for key, entry in spec["inputs"].items():
        current = None if entry["path"] in planned else read_manifest(manifest_path(entry["path"]))
        recorded = manifest["inputs"].get(key, {}).get("digest")
        if current and recorded and input_digest(spec, current) != recorded:
            causes.append(f"{job_name(entry)} was rebuilt with other content")
    return list(map(printable_line, causes))


def lacking_configfiles(folder: Path, files: Iterable[Path]) -> list[str]:
    """Describe the config files that a result in the store was built with, and this command lacks.

    They are compared by their names: a command may spell a path in many ways, and the folder of a
    build may have been moved since.
    """
    words = (read_run_record(folder) or {"options": {}})["options"].get("snakemake", ())
    names = {name for file in files for name in (file.name, file.resolve().name)}
    built_with = [
        re.sub("^--configfiles?=", "", word)
        for word in words
        if word.endswith((".yaml", ".yml", ".json"))
    ]
    lacking = " ".join(file for file in built_with if os.path.basename(file) not in names)
    return (
        [f"it was built with --configfile {lacking}, which this command lacks"] if lacking else []
    )


def job_name(job: Spec) -> str:
    """Return the name of a job (train_sft 1.3b), given its spec or an entry of a spec's inputs."""
    return f"{job['rule']} {job['name']}"


def spec_changes(old: Spec, new: Spec) -> list[str]:
    """Describe the differences of the spec that a result was made from and the spec of today."""
    if old["rule"] != new["rule"]:
        return [f"was made by {old['rule']} before"]
    lines = []
    for before, after in zip(_compared_values(old), _compared_values(new), strict=True):
        names = sorted({name for name, _ in before.items() ^ after.items()})
        changes = [_change(name, before.get(name), after.get(name)) for name in names]
        lines += changes[:MAX_LISTED]
        if len(changes) > MAX_LISTED:
            lines.append(f"{len(changes) - MAX_LISTED:,} more changes like these")
    return lines


def _compared_values(spec: Spec) -> list[dict[str, str]]:
    """Return the values of a spec by their names, of one kind after the other."""
    # Specs have `deterministic` only where it is true.
    settings = {**spec["settings"], "deterministic": spec.get("deterministic", False)}
    # The names that pages show, variables of a placement, the placement in a sweep over placements.
    settings |= {key: spec[key] for key in ("names", "environment", "placement") if key in spec}
    inputs = {f"input {key}": entry["rule"] for key, entry in spec["inputs"].items()}
    libraries = {f"library {name}": version for name, version in spec["requirements"].items()}
    return list(map(_as_text, (settings, inputs, spec["code"], spec["files"], libraries)))


def _as_text(values: Spec, prefix: str = "") -> dict[str, str]:
    """Return nested values by dotted keys as JSON: 1 differs from 1.0 and from true.

    Lists and empty mappings are values.
    """
    texts: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            texts |= _as_text(value, f"{prefix}{key}.")
        else:
            texts[f"{prefix}{key}"] = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return texts


def _change(name: str, before: str | None, after: str | None) -> str:
    """Describe a value that differs, or was added or removed. Of a digest, only that it does."""
    change, values = "changed", f" from {before} to {after}"
    if before is None:
        change, values = "was added", f": {after}"
    elif after is None:
        change, values = "was removed", f": {before}"
    is_digest = re.fullmatch('"[0-9a-f]{64}"', after or before or "")
    return f"{name} {change}{'' if is_digest else values}"
