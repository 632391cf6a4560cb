"""The space of a store: its results, the least recently used first, and which of them to remove.

Standard library only: the workflow imports this module while it plans.
"""

import datetime
import errno
import os
import re
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from snakechat.workflow.errors import InputError, warn
from snakechat.workflow.locks import AlreadyLocked, acquire_lock
from snakechat.workflow.manifest import (
    MANIFEST,
    Manifest,
    lock_path,
    read_manifest,
    read_run_record,
    state_folder,
    work_folder,
)
from snakechat.workflow.store import (
    delete_lock,
    delete_work,
    stored_folders,
    unfinished_results,
    walk_files,
)

SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class StoredResult(NamedTuple):
    """A result in a store, or what a job makes or made when it was killed.

    Attributes:
        folder: Its folder, named after its key.
        is_finished: Whether it is a result.
        num_bytes: The size of its files.
        used: Unix time of the last use: when it was made, or when a path was linked to it.
    """

    folder: Path
    is_finished: bool
    num_bytes: int
    used: float

    @property
    def id(self) -> str:
        """RULE/KEY, and what it is."""
        name = f"{self.folder.parent.name}/{self.folder.name}"
        return name if self.is_finished else f"{name} (unfinished)"

    @property
    def manifest(self) -> Manifest | None:
        """Its manifest; None if it is damaged."""
        return read_manifest(self.folder / MANIFEST)

    @property
    def host(self) -> str:
        """The machine that made it."""
        record = read_run_record(self.folder)
        return record["host"] if record else "unknown"

    @property
    def made(self) -> float:
        """Unix time at which it was made."""
        record = read_run_record(self.folder)
        if record is None:
            return self.used
        started = datetime.datetime.fromisoformat(record["started"])
        return started.timestamp() + record["seconds"]


def stored_results(store: Path) -> list[StoredResult]:
    """Return the results of a store, the least recently used first."""
    return examine((folder, True) for folder in stored_folders(store))


def examine(folders: Iterable[tuple[Path, bool]]) -> list[StoredResult]:
    """Return what is in folders of a store, the least recently used first.

    folders: The folder of each result, and whether it is finished.
    """
    results = []
    for folder, is_finished in folders:
        place = folder if is_finished else work_folder(folder)
        # Another process may remove it.
        with suppress(OSError):
            statuses = [path.lstat() for path in walk_files(place)]
            times = [place.stat().st_mtime]
            if not is_finished:
                times += [status.st_mtime for status in statuses]
            num_bytes = sum(status.st_size for status in statuses)
            results.append(StoredResult(folder, is_finished, num_bytes, max(times)))
    return sorted(results, key=lambda result: (result.used, result.folder))


def collect(
    store: Path, needed: Collection[str], max_bytes: int, interrupted: bool = False
) -> list[StoredResult]:
    """Remove the least recently used results, and what killed jobs left, until a store is small.

    Args:
        store: The store.
        needed: Keys of results that stay.
        max_bytes: Space that the store may use.
        interrupted: Remove the checkpoints of interrupted jobs, too.

    Returns:
        What was removed.
    """
    started = time.time()
    folders = [(folder, True) for folder in stored_folders(store)]
    results = examine([*folders, *((folder, False) for folder in unfinished_results(store))])
    # A job may wait in the queue of a cluster to go on from its checkpoints.
    kept = {} if interrupted else {result.folder for result in interrupted_jobs(store)}
    num_bytes = sum(result.num_bytes for result in results)
    removed = []
    for result in results:
        if num_bytes <= max_bytes:
            break
        is_needed = result.folder.name in needed if result.is_finished else result.folder in kept
        if not is_needed and _remove(result, started):
            removed.append(result)
            num_bytes -= result.num_bytes
    return removed


def interrupted_jobs(store: Path) -> list[StoredResult]:
    """Return what jobs left that have checkpoints, the least recently used first."""
    folders = [
        folder for folder in unfinished_results(store) if any(state_folder(folder).glob("*"))
    ]
    return examine((folder, False) for folder in folders)


def _remove(result: StoredResult, started: float) -> bool:
    """Delete a result, renamed first so that nobody finds a part of it; return whether it is gone.

    What a process makes or has linked since the start stays.
    """
    folder = result.folder
    try:
        descriptor = acquire_lock(lock_path(folder))
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return is_full and result.is_finished and _remove_on_full_disk(folder, started)
    except AlreadyLocked:
        return False
    try:
        is_unused = not result.is_finished or folder.stat().st_mtime < started
        if is_unused:
            if result.is_finished:
                os.rename(folder, work_folder(folder) / "removed")
            delete_work(folder)
        delete_lock(folder)
        return is_unused
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _remove_on_full_disk(folder: Path, started: float) -> bool:
    """Delete a result where no lock can be made, unless a job has one; as _remove."""
    with suppress(OSError):
        if folder.stat().st_mtime < started:
            # A job of this result makes this folder first. If it exists, this fails.
            os.rename(folder, work_folder(folder))
            delete_work(folder)
            work_folder(folder).rmdir()
            return True
    return False


def warn_of_size(store: Path, max_bytes: int) -> None:
    """Print a line if a store uses more space than it should, and how to trim it."""
    num_bytes = sum(result.num_bytes for result in stored_results(store))
    if num_bytes > max_bytes:
        limit = format_size(max_bytes)
        warn(
            f"{store} has {format_size(num_bytes)}, and store_max_size is {limit}: python"
            f" scripts/store.py gc --store {store} --max-size {limit.replace(' ', '')} removes what"
            " no build uses"
        )


def format_size(number: float) -> str:
    """Format bytes in the largest unit of which there is one at least."""
    unit = min(4, (int(number).bit_length() - 1) // 10) if number else 0
    name = ("B", "KiB", "MiB", "GiB", "TiB")[unit]
    return f"{number / (1 << 10 * unit):,.1f} {name}" if unit else f"{number} B"


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 500G or 1.5T, in powers of 1024.

    Raises:
        InputError: The text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text, re.IGNORECASE)
    if not match:
        raise InputError(f"{text!r} is not a size: write a number and K, M, G or T, such as 500G")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])
