"""Why a result is stale: what its manifest records, compared with the job of today."""

import os
from collections.abc import Container
from pathlib import Path
from typing import Any

from snakechat.planning.changes import job_name, spec_changes
from snakechat.workflow.manifest import MANIFEST, input_digest, manifest_path, read_manifest
from snakechat.workflow.printable import printable_line
from snakechat.workflow.store import Damaged, check_files

NEVER_BUILT = "has never been built"


def causes_of(spec: dict[str, Any], planned: Container[str] = ()) -> list[str]:
    """Describe why the result of a job is stale, apart from upstream jobs that will run.

    Args:
        spec: The spec of today.
        planned: Paths of the results that will be rebuilt.
    """
    path = spec["path"]
    file = Path(path, MANIFEST)
    manifest = read_manifest(file)
    if manifest is None:
        if file.exists():
            return [f"{file} cannot be read"]
        return [f"{path} is missing" if os.path.lexists(path) else NEVER_BUILT]
    causes = spec_changes(manifest["spec"], spec)
    try:
        check_files(Path(path), manifest, digests=None)
    except Damaged as damage:
        causes.append(f"{path}: {damage}")
    for key, entry in spec["inputs"].items():
        current = None if entry["path"] in planned else read_manifest(manifest_path(entry["path"]))
        recorded = manifest["inputs"].get(key)
        if current and recorded and input_digest(spec, current) != recorded:
            causes.append(f"{job_name(entry)} was rebuilt with other content")
    return list(map(printable_line, causes))
