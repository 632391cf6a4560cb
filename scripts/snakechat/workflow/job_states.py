"""What the jobs of a target are doing, from the files of a build: specs, manifests, locks, logs.

Nothing is locked or written: a lock that was tried, even for a moment, could end a job that starts.
"""

import os
import platform
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from snakechat.workflow.digests import digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import read_spec
from snakechat.workflow.manifest import Manifest, input_digest, manifest_path
from snakechat.workflow.run_record import read_run_record
from snakechat.workflow.valid_manifests import read_valid_manifest

State = Literal["waits", "running", "failed", "finished"]
# Bytes of the end of a log that are read.
LOG_TAIL = 1 << 15


class Holder(NamedTuple):
    """The process that took a lock last.

    is_alive: None if it is on another host.
    """

    process: int
    host: str
    is_alive: bool | None


class JobState(NamedTuple):
    """A job of a target.

    Attributes:
        rule, name, path: As in its spec.
        state: "failed" also for jobs that were stopped.
        seconds: The time of the run that made the result, or since the start; None if unknown.
        holder: The process of a running job.
        error: The last error in the log of a failed job; "" if it was killed.
    """

    rule: str
    name: str
    path: str
    state: State
    seconds: float | None = None
    holder: Holder | None = None
    error: str = ""


def job_states(root: Path, jobs: Iterable[tuple[str, str, str]]) -> list[JobState]:
    """Return the states of jobs and of all jobs upstream, which come first.

    Args:
        root: The folder output/.
        jobs: Rule, name and path of each. Those without any spec or result are omitted.
    """
    states: dict[str, JobState] = {}
    manifests: dict[str, Manifest | None] = {}

    def visit(rule: str, name: str, path: str) -> None:
        if path in manifests:
            return
        manifest = manifests[path] = read_valid_manifest(manifest_path(_folder(root, path)))
        found = _newest_spec(root, rule, name)
        if found:
            try:
                spec = read_spec(found)
            except (InputError, OSError):
                return
        elif manifest:
            spec = manifest["spec"]
        else:
            return
        for entry in spec["inputs"].values():
            visit(entry["rule"], entry["name"], entry["path"])
        is_current = (
            manifest is not None
            and digest(manifest["spec"]) == digest(spec)
            and all(
                (upstream := manifests[entry["path"]])
                and manifest["inputs"].get(key) == input_digest(spec, upstream)
                for key, entry in spec["inputs"].items()
            )
        )
        job = (rule, name, path)
        states[path] = _state(root, job, found, manifest is not None, is_current)

    for job in jobs:
        visit(*job)
    return list(states.values())


def _state(
    root: Path, job: tuple[str, str, str], spec: Path | None, has_result: bool, is_current: bool
) -> JobState:
    """Return the state of a job.

    Args:
        job: Its rule, name and path.
        spec: Its newest spec file.
        has_result: Whether it has a result at all.
        is_current: Whether its result was made from that spec and today's inputs.
    """
    rule, name, path = job
    folder = _folder(root, path)
    lock = folder.with_name(f".{folder.name}.lock")
    is_growing = growing_folder(folder).exists()
    if is_current and not is_growing:
        run = read_run_record(folder)
        return JobState(*job, "finished", run["seconds"] if run else None)
    holder, started = lock_holder(lock), modified(lock)
    # A lock file outlives its process, whose number another process may have by now.
    if holder and (is_growing or started >= modified(spec)):
        error = last_error(root / "logs" / rule / f"{name}.log")
        has_error = error.startswith("error: ")
        if holder.is_alive or (holder.is_alive is None and not has_error):
            return JobState(*job, "running", time.time() - started, holder)
        # The run that has ended may be the one that made the result, from earlier inputs.
        if is_growing or not has_result or has_error:
            return JobState(*job, "failed", error=error)
    return JobState(*job, "waits")


def _folder(root: Path, path: str) -> Path:
    """Return the folder of a result: output/ may have another name or place by now."""
    return root / path.removeprefix("output/")


def growing_folder(result: Path) -> Path:
    """Return the folder that a job writes into, which becomes the result."""
    return result.with_name(f".{result.name}.tmp")


def lock_holder(path: Path) -> Holder | None:
    """Return the process that took a lock last (snakechat.workflow.locks); None for none."""
    match = re.fullmatch(r"process (\d+) on (.*)\n", read_tail(path))
    if not match:
        return None
    process, host = int(match[1]), match[2]
    return Holder(process, host, is_alive(process) if host == platform.node() else None)


def is_alive(process: int) -> bool:
    """Return whether a process of this host runs."""
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def last_error(log: Path) -> str:
    """Return the last error in a log; else its last line, or "" if that is a progress bar."""
    lines = [line.strip() for line in re.split(r"[\r\n]", read_tail(log)) if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    last = (errors or lines or [""])[-1]
    return "" if re.search(r"\d+/\d+ \[", last) else last


def read_tail(path: Path) -> str:
    """Return the end of a text file; "" if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - LOG_TAIL, 0))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def modified(path: Path | None) -> float:
    """Return when a file was written; 0 if there is none."""
    try:
        return path.stat().st_mtime if path else 0
    except OSError:
        return 0


def _newest_spec(root: Path, rule: str, name: str) -> Path | None:
    """Return the newest spec file of a job, or None."""
    folder = (root / "specs" / rule / name).parent
    # The name, a hyphen and 16 digits of the digest.
    return max(folder.glob(f"{Path(name).name}-{'?' * 16}.json"), key=modified, default=None)
