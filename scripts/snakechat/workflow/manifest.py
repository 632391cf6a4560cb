"""Manifests: which files a result has and what it was made from, back to the sources.

manifest.json repeats the spec of the job, records the digests of its inputs, the lineage and
the facts that the job found out, and lists the size and sha256 of every file of the result. It
contains no times, so that two builds of the same spec write the same bytes, and its own digest.

An input counts by its content, that is by its files: a result stays up to date if an input was
rebuilt and came out the same ("early cutoff": Mokhov, Mitchell and Peyton Jones, Build Systems a la
Carte, 2018, section 2.3).

A manifest has no names of recipes, datasets or models: results are RULE/KEY, and names are links to
them (snakechat.workflow.links).

Each manifest contains its whole lineage, so that a checkpoint that was copied elsewhere still has
it. A lineage is a dict of jobs by RULE/KEY: rule, settings, facts (a commit, rows dropped), number
and digest of the external files, digest of the spec, digest of the content, and the RULE/KEY of
each input. It is what a result was really made from: it stays if an upstream job is done again from
another spec and yields the same content. Pages show it with names (`named_lineage`).

Standard library only: the workflow imports this module while it plans.
"""

from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from snakechat.workflow.digests import digest, file_digests, read_sealed
from snakechat.workflow.errors import InputError
from snakechat.workflow.processes import DEFAULTS

Manifest = dict[str, Any]

STORE = Path(DEFAULTS.stores[0])
REPLIES = "llm_replies"

MANIFEST = "manifest.json"
# When, where and how the run was that made a result: it differs from run to run.
RUN_RECORD = "run.json"
# Files in a result folder that the manifest does not list. Snakemake leaves an empty timestamp file
# in folders that a user requests by name. A model card names the options of one build, and people
# edit it before they publish a model: neither makes another model of it.
UNLISTED_FILES = {".snakemake_timestamp", MANIFEST, "README.md", RUN_RECORD}
KEYS = {"spec", "inputs", "lineage", "facts", "files"}


# Digits of a key: the first half of a SHA-256, since the key names a folder.
KEY_DIGITS = 32


def without_names(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what counts of a spec: all but the names and the paths of the job and its inputs."""
    counted = {key: value for key, value in spec.items() if key not in ("name", "path")}
    return counted | {
        "inputs": {key: {"rule": entry["rule"]} for key, entry in spec["inputs"].items()}
    }


def store_key(spec: Mapping[str, Any], input_digests: Mapping[str, str]) -> str:
    """Return the digest of everything that determines a result: its spec and its inputs.

    spec: With names or without.
    """
    return digest([without_names(spec), input_digests])[:KEY_DIGITS]


def result_id(manifest: Mapping[str, Any]) -> str:
    """Return RULE/KEY of a result."""
    digests = {key: entry["digest"] for key, entry in manifest["inputs"].items()}
    return f"{manifest['spec']['rule']}/{store_key(manifest['spec'], digests)}"


def recorded_inputs(
    spec: Mapping[str, Any], manifests: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, str]]:
    """Return what a manifest records of the inputs of a job: their RULE/KEY and their digests.

    manifests: The manifests of the inputs, by their names in the spec.
    """
    return {
        key: {"result": result_id(upstream), "digest": input_digest(spec, upstream)}
        for key, upstream in manifests.items()
    }


def manifest_path(folder: str | Path) -> Path:
    """Return the path of the manifest next to a result folder."""
    return Path(f"{folder}.manifest.json")


def read_manifest(path: str | Path) -> Manifest | None:
    """Return a manifest, or None if the file is missing or damaged in any way."""
    manifest = read_sealed(path)
    return manifest if manifest and manifest.keys() >= KEYS else None


def result_files(folder: str | Path) -> dict[str, dict[str, Any]]:
    """Return the size and sha256 of every file in a result folder, by relative path."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    paths = [path for path in paths if path.name not in UNLISTED_FILES]
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256}
        for path, sha256 in file_digests(paths).items()
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


def require_manifest(path: str | Path) -> Manifest:
    """Return a manifest.

    Raises:
        InputError: The file is missing or damaged.
    """
    manifest = read_manifest(path)
    if manifest is None:
        raise InputError(f"{path} cannot be read: delete it and start the build again")
    return manifest


# --- places -----------------------------------------------------------------------------------


def work_folder(folder: Path) -> Path:
    """Return the folder with the lock, the unfinished files and the checkpoints of a result."""
    return folder.with_name(f".{folder.name}")


def lock_path(folder: Path) -> Path:
    """Return the file that the process locks which makes or removes a result."""
    return work_folder(folder) / "lock"


def unfinished_folder(folder: Path) -> Path:
    """Return the folder that becomes a result in the store."""
    return work_folder(folder) / "result"


def state_folder(folder: Path) -> Path:
    """Return the folder with the checkpoints of the job that makes a result."""
    return work_folder(folder) / "state"


def replies_folder(store: Path) -> Path:
    """Return the folder of the replies of LLM judges: in a shared store, or beside the own."""
    return (store.parent if store == STORE else store) / REPLIES


# --- records of runs ---------------------------------------------------------------------------

# A variable: the folder of results from whose records a build takes its rungs (make reproduce).
REPRODUCED = "SNAKECHAT_RUNGS_OF"


def read_run_record(
    folder: str | Path, entry: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the record of the run that made a result; None if it is missing or damaged.

    entry: Of the result in a lineage: the record of a run with another spec counts as missing.
        Accepted results keep the record of their run.
    """
    record = read_sealed(Path(folder, RUN_RECORD))
    if record and entry:
        specs = {entry["spec"], *(change["from"] for change in entry.get("accepted", ()))}
        return record if record["spec"] in specs else None
    return record


# --- lineage --------------------------------------------------------------------------------------

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
    graph = {path: jobs[path]["inputs"] for path in sorted(jobs)}
    return list(TopologicalSorter(graph).static_order())
