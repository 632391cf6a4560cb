"""Digests of JSON values and files, and manifests: what a result has and what it was made from.

manifest.json repeats the spec of the job, records the digests of its inputs, the lineage and
the facts that the job found out, and lists the size and sha256 of every file of the result. It has
no times, and names only where pages or metrics show them. Two builds of one spec write the same
bytes. Its own digest shows whether it is damaged.

An input counts by its content, that is by its files: a result stays up to date if an input was
rebuilt and came out the same ("early cutoff": Mokhov, Mitchell and Peyton Jones, Build Systems a la
Carte, 2018, section 2.3).

A lineage is a dict of all jobs upstream by RULE/KEY (merge_lineages), which a copied checkpoint
still has. It is what a result was really made from: it stays if an upstream job is done again from
another spec and yields the same content.

Standard library only: the workflow imports this module while it plans.
"""

import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, TypeVar

from snakechat.workflow.errors import InputError, ProgressLines
from snakechat.workflow.processes import DEFAULTS

AnyPath = TypeVar("AnyPath", bound=str | Path)

# The key with the digest of a JSON object, which the object does not have itself.
SEAL = "sha256"
# Seconds after the last change of a file in which another change may leave its times as they are:
# FAT has the coarsest times, 2 s. One more for the clock of a file server.
RECENT = 3.0

# What planning remembers; it can be deleted at any time. Planning writes nowhere else.
MEMORY = Path(".snakemake/snakechat")

Manifest = dict[str, Any]
# Returns the digests of files by their paths.
FileDigests = Callable[[Iterable[Path]], dict[Path, str]]

STORE = Path(DEFAULTS.stores[0])

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


# --- values -----------------------------------------------------------------------------------


def canonical_json(value: Any) -> str:
    """Return one JSON text per value: sorted keys, no blanks. NaN and infinity raise ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """Return the sha256 (hex) of a JSON value; 1 and 1.0 differ, as they do for a program."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sealed_json(value: Mapping[str, Any]) -> str:
    """Return the text of a JSON object with its own digest, by which read_sealed notices damage."""
    return json.dumps({**value, SEAL: digest(value)}, indent=1, sort_keys=True) + "\n"


def read_sealed(path: str | Path) -> dict[str, Any] | None:
    """Return the object that sealed_json wrote into a file; None if it is missing or damaged."""
    try:
        value = json.loads(Path(path).read_text())
        return value if isinstance(value, dict) and value.pop(SEAL, "") == digest(value) else None
    except (OSError, ValueError, RecursionError):
        return None


# --- files ------------------------------------------------------------------------------------


def file_digest(path: str | Path, is_cancelled: Callable[[], bool] = lambda: False) -> str:
    """Return the sha256 (hex) of the bytes of a file, unless reading is cancelled."""
    sha = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            if is_cancelled():
                raise CancelledError
            sha.update(chunk)
    return sha.hexdigest()


def file_digests(paths: Iterable[AnyPath]) -> dict[AnyPath, str]:
    """Return the sha256 (hex) of many files, in the order of the paths.

    Several threads read them, because hashlib releases the interpreter's lock.
    """
    order = list(dict.fromkeys(paths))
    progress = ProgressLines("reading", "files", len(order))
    digests: dict[AnyPath, str] = {}
    # Reading from more disks or servers at once than this rarely helps.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        cancelled = threading.Event()
        found = pool.map(lambda path: file_digest(path, cancelled.is_set), order)
        try:
            for path, sha256 in zip(order, found, strict=True):
                digests[path] = sha256
                progress.update(len(digests))
        finally:
            # Neither an error nor Ctrl+C waits for a file of many gigabytes.
            cancelled.set()
    return digests


def file_identity(path: str | Path) -> list[int]:
    """Return the size, the modification and change time in ns, and the inode of a file.

    An edit changes at least one of them, unless it follows another one within RECENT: it can
    restore the modification time, but not the change time.
    """
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


class DigestCache:
    """Cached digests of files: a file is read only if its identity changed.

    Whatever is wrong with the file of the cache costs time only.
    """

    def __init__(self, path: str | Path) -> None:
        # The working directory may be another one later.
        self.path = Path(path).absolute()
        # Identity and digest by real path.
        self.entries = self._read()

    def digests(self, paths: Iterable[AnyPath]) -> dict[AnyPath, str]:
        """Return the digests of files, in the order of the paths."""
        # An edit after or during the digest must not be hidden by equal times. As git does for its
        # index ("racy git"): on a file system with coarse times, a second edit within the same tick
        # changes no time. Files with a time in the future are omitted, too.
        latest = (time.time() - RECENT) * 1e9
        order = {path: os.path.realpath(str(path)) for path in paths}
        now = {path: file_identity(path) for path in order.values()}
        found = file_digests(path for path in now if self.entries.get(path, [])[:-1] != now[path])
        if entries := {
            path: [*now[path], sha256]
            for path, sha256 in found.items()
            if max(now[path][1:3]) <= latest
        }:
            # With those that another process wrote in the meantime.
            self.entries = {**self.entries, **self._read(), **entries}
            with suppress(OSError):
                write_atomically(self.path, canonical_json(self.entries), durable=False)
        return {path: found.get(real) or self.entries[real][-1] for path, real in order.items()}

    def _read(self) -> dict[str, list[Any]]:
        """Return the entries in the file of the cache."""
        with suppress(OSError, ValueError, TypeError, RecursionError):
            return dict(json.loads(self.path.read_text()))
        return {}


# --- writing ----------------------------------------------------------------------------------


def write_atomically(path: Path, text: str, durable: bool = True) -> None:
    """Write a small text file; a concurrent reader gets the old or the new text, never a mix.

    durable: Whether a power cut after this call must not lose the text, nor a power cut during it
        leave an empty file. It costs some milliseconds, which a thousand spec files need not spend:
        their names contain their digests, so that a damaged one is noticed and rewritten.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        if durable:
            fsync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        fsync(path.parent)


def fsync(path: str | Path) -> None:
    """Store a file, or the names in a folder, on disk: a rename in it then survives a power cut.

    File systems that cannot do this (some network file systems) raise nothing.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def planned_files(planned: Mapping[Path, str]) -> Iterator[None]:
    """Check that files have the planned content until the end of the context, which reads them.

    A file that was replaced and put back has its digest again, although the other one may have been
    read. Its times differ, so that they decide; a file that was only touched is an error too.

    planned: The sha256 of each file. Raises InputError if one differs or was edited.
    """
    before = {path: file_identity(path) for path in planned if path.is_file()}
    found = file_digests(before)
    for path, digest in planned.items():
        if found.get(path) != digest:
            raise InputError(f"{path} changed since this build was planned: start it again")
    yield
    for path, identity in before.items():
        if not path.exists() or file_identity(path) != identity:
            raise InputError(f"{path} changed while it was read: start the build again")


# --- keys and manifests -----------------------------------------------------------------------


def without_names(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what counts of a spec: all but the names and the paths of the job and its inputs."""
    counted = {key: value for key, value in spec.items() if key not in ("name", "path")}
    inputs = {key: {"rule": entry["rule"]} for key, entry in spec["inputs"].items()}
    return counted | {"inputs": inputs}


def store_key(spec: Mapping[str, Any], input_digests: Mapping[str, str]) -> str:
    """Return the digest of everything that determines a result: its spec and its inputs."""
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
    listed = (
        path
        for path in sorted(Path(folder).rglob("*"))
        if path.name not in UNLISTED_FILES and path.is_file()
    )
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256}
        for path, sha256 in file_digests(listed).items()
    }


def content_digest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of the files of a result, whatever they were made from."""
    return digest(manifest["files"])


def input_digest(spec: Mapping[str, Any], upstream: Mapping[str, Any]) -> str:
    """Return the digest of an input as a job records it, given its manifest.

    If the program of the job shows what its inputs were made from, their whole manifests count.
    """
    return digest(upstream) if spec.get("shows_provenance") else content_digest(upstream)


def require_manifest(path: str | Path) -> Manifest:
    """Return a manifest; raise InputError if the file is missing or damaged."""
    manifest = read_manifest(path)
    if manifest is None:
        raise InputError(f"{path} cannot be read: delete it and start the build again")
    return manifest


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
    if not record or not entry:
        return record
    specs = (entry["spec"], *(change["from"] for change in entry.get("accepted", ())))
    return record if record["spec"] in specs else None


# --- lineage --------------------------------------------------------------------------------------

Lineage = dict[str, dict[str, Any]]


def merge_lineages(manifests: Collection[Mapping[str, Any]]) -> Lineage:
    """Return the lineage of a job, given the manifests of its inputs.

    An input of the job itself is listed as it is, and not as another input was made from it.
    """
    jobs = {result: job for each in manifests for result, job in each["lineage"].items()}
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


def named_lineage(
    results: Mapping[str, str], lineage: Lineage, names: Mapping[str, Mapping[str, str]]
) -> Lineage:
    """Return a lineage by paths: each job has its name, and its inputs as a list of paths.

    A job that the config of today names no more has its RULE/KEY in place of a path.

    results: The RULE/KEY of results by their paths.
    lineage: These results and all jobs before them.
    names: The paths of the inputs of each job by the names in its spec, by the path of the job.
    """
    jobs: Lineage = {}
    pending = list(results.items())
    for path, result in pending:
        if path not in jobs:
            job, paths = lineage[result], names.get(path, {})
            inputs = {paths.get(key, upstream): upstream for key, upstream in job["inputs"].items()}
            jobs[path] = {**job, "name": path.rpartition("/")[2], "inputs": sorted(inputs)}
            pending += inputs.items()
    return jobs


def upstream_first(jobs: Lineage) -> list[str]:
    """Return the paths of a lineage: each job follows all its inputs, those without any first."""
    graph = {path: jobs[path]["inputs"] for path in sorted(jobs)}
    return list(TopologicalSorter(graph).static_order())
