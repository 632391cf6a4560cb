"""Manifests: which files a result has and what it was made from.

manifest.json repeats the spec of the job, records the digests of its inputs, the lineage and
the facts that the job found out, and lists the size and sha256 of every file of the result. It
contains no times, so that two builds of the same spec write the same bytes.

An input counts by its content, that is by its files: a result stays up to date if an input was
rebuilt and came out the same ("early cutoff": Mokhov, Mitchell and Peyton Jones, Build Systems a la
Carte, 2018, section 2.3).

Standard library only: the workflow imports this module while it plans.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snakechat.workflow.digests import DigestCache, canonical_json, digest, file_digest
from snakechat.workflow.errors import InputError

Manifest = dict[str, Any]

MANIFEST = "manifest.json"
# When, where and how the run was that made a result: it differs from run to run.
RUN_RECORD = "run.json"
# Files in a result folder that the manifest does not list. Snakemake leaves an empty timestamp file
# in folders that a user requests by name. A model card names the options of one build, and people
# edit it before they publish a model: neither makes another model of it.
UNLISTED_FILES = {".snakemake_timestamp", MANIFEST, "README.md", RUN_RECORD}


# More levels than any manifest has: the config of a job has at most 50.
MAX_DEPTH = 100


def manifest_path(folder: str | Path) -> Path:
    """Return the path of the manifest next to a result folder."""
    return Path(f"{folder}.manifest.json")


def read_manifest(path: str | Path) -> Manifest | None:
    """Return a manifest, or None if the file is missing or is not a manifest."""
    try:
        return parse_manifest(Path(path).read_text())
    except (OSError, UnicodeDecodeError):
        return None


def parse_manifest(text: str) -> Manifest | None:
    """Return the manifest in a JSON text, or None if it is not one."""
    try:
        manifest = json.loads(text)
        # Fails for numbers that are not finite and for values that are nested too deeply.
        canonical_json(manifest)
        mappings = [manifest[name] for name in ("inputs", "lineage", "facts", "files")]
        mappings.append(manifest["spec"]["inputs"])
        has_path = isinstance(manifest["spec"]["path"], str)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if _is_nested(manifest, MAX_DEPTH):
        return None
    is_manifest = has_path and all(isinstance(mapping, dict) for mapping in mappings)
    return manifest if is_manifest else None


def _is_nested(value: Any, levels: int) -> bool:
    """Return whether a JSON value has mappings and lists in more than a number of levels."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_nested(item, levels - 1) for item in items)


def result_files(folder: str | Path, cache: DigestCache | None = None) -> dict[str, dict[str, Any]]:
    """Return the size and sha256 of every file in a result folder, by relative path.

    cache: Digests of files that have not changed since; None reads all files.
    """
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    paths = [path for path in paths if path.name not in UNLISTED_FILES]
    digests = cache.digests(paths) if cache else {path: file_digest(path) for path in paths}
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": digests[path]}
        for path in paths
    }


def content_digest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of the files of a result, whatever they were made from."""
    return digest(manifest["files"])


def input_digest(spec: Mapping[str, Any], upstream: Mapping[str, Any]) -> str:
    """Return the digest of an input as a job records it.

    Args:
        spec: The spec of the job. If its program shows what its inputs were made from, their whole
            manifests count.
        upstream: The manifest of the input.
    """
    return digest(upstream) if spec.get("shows_provenance") else content_digest(upstream)


def result_key(spec: Mapping[str, Any], input_digests: Mapping[str, str]) -> str:
    """Return the digest of everything that determines the content of a result."""
    return digest([spec, input_digests])


def read_input(entry: Mapping[str, str]) -> Manifest:
    """Return the manifest of an input of a job.

    Args:
        entry: An entry of the `inputs` of a spec, with the `path` of the result.

    Raises:
        InputError: The manifest is missing or damaged.
    """
    path = manifest_path(entry["path"])
    manifest = read_manifest(path)
    if manifest is None:
        raise InputError(f"{path} cannot be read: delete it and start the build again")
    return manifest


def check_files(folder: str | Path, manifest: Manifest, cache: DigestCache | None = None) -> None:
    """Raise InputError unless the files of a result are those of its manifest.

    cache: As in result_files.
    """
    files = result_files(folder, cache)
    for name in sorted(manifest["files"].keys() | files):
        if manifest["files"].get(name) != files.get(name):
            raise InputError(
                f"{folder}/{name} does not match its manifest:"
                f" delete {folder} and start the build again"
            )
