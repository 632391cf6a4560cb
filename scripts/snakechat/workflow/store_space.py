"""The space of a store: its results, the least recently used first, and which of them to remove.

Standard library only: jobs use this module before their program imports anything else.
"""

import datetime
import os
import re
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import MANIFEST, Manifest, read_manifest
from snakechat.workflow.run_record import read_run_record
from snakechat.workflow.shared_store import remove_result
from snakechat.workflow.store import stored_folders, walk_files

HOUR_SECONDS, DAY_SECONDS = 3600, 24 * 3600
# Seconds between two checks of the size limit, which examine every result of the store.
COLLECT_INTERVAL = 600
SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class StoredResult(NamedTuple):
    """A result in a store.

    Attributes:
        folder: Its folder, named after its key.
        manifest: Its manifest; None if it is damaged.
        used: Unix time of the last use: when it was made, or was taken from a shared store.
    """

    folder: Path
    manifest: Manifest | None
    used: float

    @property
    def path(self) -> str:
        """The path of the result, such as output/sft/NAME; its folder if it is damaged."""
        return self.manifest["spec"]["path"] if self.manifest else str(self.folder)

    @property
    def num_bytes(self) -> int:
        """The size of its files."""
        files = self.manifest["files"].values() if self.manifest else ()
        return sum(properties["size"] for properties in files)

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
    """Return the results of a store, or of a part of it, the least recently used first."""
    results = []
    for folder in stored_folders(store):
        # Another process may remove it.
        with suppress(OSError):
            used = folder.stat().st_mtime
            results.append(StoredResult(folder, read_manifest(folder / MANIFEST), used))
    return sorted(results, key=lambda result: (result.used, result.folder))


def collect(store: Path, needed: Collection[Path], max_bytes: int) -> list[StoredResult]:
    """Remove the least recently used results.

    Args:
        store: The store.
        needed: Real paths of folders that stay and do not count.
        max_bytes: Space that the others may use.

    Returns:
        The results that were removed.
    """
    _delete_leftovers(store)
    results = [result for result in stored_results(store) if result.folder.resolve() not in needed]
    num_bytes = sum(result.num_bytes for result in results)
    removed = []
    for result in results:
        if num_bytes > max_bytes and remove_result(result.folder):
            removed.append(result)
            num_bytes -= result.num_bytes
    return removed


def keep_limit(store: Path, needed: Callable[[], Collection[Path]], max_bytes: int | None) -> None:
    """Remove what is beyond the size limit, unless that was done a short while ago.

    Results that were used in the last hour stay: another job may be about to link them.

    Args:
        store: The store.
        needed: Returns what collect does not remove.
        max_bytes: As in collect, None for any.
    """
    stamp = store / "collected"
    try:
        is_recent = abs(time.time() - stamp.stat().st_mtime) < COLLECT_INTERVAL
    except OSError:
        is_recent = False
    if max_bytes is None or is_recent:
        return
    with suppress(OSError):
        stamp.touch()
        # Everyone who may write to a shared store may note this.
        stamp.chmod(store.stat().st_mode & 0o666)
    start = time.time() - HOUR_SECONDS
    recent = {result.folder.resolve() for result in stored_results(store) if result.used > start}
    collect(store, {*needed(), *recent}, max_bytes)


def _delete_leftovers(store: Path) -> None:
    """Delete the temporary folders of killed processes; younger ones may be in use."""
    for parent, folders, _ in os.walk(store):
        for leftover in [Path(parent, name) for name in folders if name.endswith(".tmp")]:
            if _newest_time(leftover) < time.time() - DAY_SECONDS:
                shutil.rmtree(leftover, ignore_errors=True)
        folders[:] = [name for name in folders if not name.endswith(".tmp")]


def _newest_time(folder: Path) -> float:
    """Return the newest modification time in a folder, itself included; 0 if it is gone."""
    newest = 0.0
    for path in [folder, *walk_files(folder)]:
        with suppress(OSError):
            newest = max(newest, path.lstat().st_mtime)
    return newest


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 500G or 1.5T, in powers of 1024.

    Raises:
        InputError: The text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text, re.IGNORECASE)
    if not match:
        raise InputError(f"{text!r} is not a size: write a number and K, M, G or T, such as 500G")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])
