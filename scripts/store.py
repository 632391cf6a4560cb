"""List and trim a store of results.

    python scripts/store.py list                      # all results and how many versions they have
    python scripts/store.py list output/rlhf/mine     # its versions, and what changed between them
    python scripts/store.py gc --max-size 500G

Names refer to output/ in the working directory. The folder of a version can be used like a
result: with transformers, or with scripts/chat.py. Do not change its files. scripts/verify.py reads
them all and compares their digests.

gc removes the least recently used results until the store takes at most SIZE. What the links of an
output folder lead to, or was copied there, stays: of each one that used this store (STORE/roots).
So do the checkpoints and the inputs of interrupted jobs, which may wait in the queue of a cluster,
unless --interrupted is given.
"""

import argparse
import datetime
import errno
import os
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from snakechat.jobs.stale_causes import spec_changes
from snakechat.workflow.errors import InputError, one_line_errors
from snakechat.workflow.links import (
    is_manifest,
    keys_of_link,
    linked_folder,
    named_versions,
    root_links,
    versions_of,
)
from snakechat.workflow.locks import AlreadyLocked, acquire_lock
from snakechat.workflow.manifest import (
    MANIFEST,
    STORE,
    Manifest,
    content_digest,
    lock_path,
    read_manifest,
    read_run_record,
    result_id,
    state_folder,
    work_folder,
)
from snakechat.workflow.store import (
    delete_lock,
    delete_work,
    format_size,
    noted_inputs,
    parse_size,
    stored_folders,
    unfinished_results,
    walk_files,
)

# Seconds by which the clock of a file server may be behind.
CLOCK_DIFFERENCE = 2


@one_line_errors()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--store", type=Path, default=STORE, metavar="FOLDER", help=f"default: {STORE}"
    )
    listing = commands.add_parser("list", parents=[common], help="list results, newest first")
    listing.add_argument("target", nargs="?", help="a result, such as output/rlhf/mine")
    collection = commands.add_parser("gc", parents=[common], help="remove what no build uses")
    collection.add_argument(
        "--max-size",
        required=True,
        metavar="SIZE",
        help="remove the least recently used results until the store takes at most this (500G)",
    )
    collection.add_argument(
        "--interrupted",
        action="store_true",
        help="remove the checkpoints of interrupted jobs and what they alone need, too",
    )
    arguments = parser.parse_args()
    if not arguments.store.is_dir():
        raise InputError(f"{arguments.store} does not exist: set --store to the folder of a store")
    if arguments.command == "gc":
        remove(arguments.store, parse_size(arguments.max_size), arguments.interrupted)
    elif arguments.target:
        list_versions(arguments.target)
    else:
        list_results(arguments.store)


# --- list -------------------------------------------------------------------------------------


def list_results(store: Path) -> None:
    """Print a line for each result with the number of its versions."""
    names = named_versions(Path("output"))
    versions: dict[str, list[StoredResult]] = {}
    results = examine(stored_folders(store))
    for result in results:
        # A result without a name belongs to another output folder.
        for path in names.get(result.folder.resolve(), [result.id]):
            versions.setdefault(path, []).append(result)
    for path, stored in sorted(versions.items()):
        size = format_size(sum(result.num_bytes for result in stored))
        newest = max(result.made for result in stored)
        noun = "version" if len(stored) == 1 else "versions"
        print(f"{format_time(newest)}  {size:>12}  {len(stored):4} {noun:8}  {path}")
    size = format_size(sum(result.num_bytes for result in results))
    print(f"{len(results):,} results, {size}")


def list_versions(target: str) -> None:
    """Print the versions of a result, newest first: when, where, how large, what changed.

    Raises:
        InputError: There are none.
    """
    path = target.rstrip("/").removesuffix(f".{MANIFEST}")
    results = examine(versions_of(path))
    if not results:
        raise InputError(f"no version of {path}")
    results.sort(key=lambda result: result.made)
    current = linked_folder(path)
    for number in reversed(range(len(results))):
        result = results[number]
        mark = "  current" if result.folder == current else ""
        size = format_size(result.num_bytes)
        print(f"{format_time(result.made)}  {size:>12}  {result.host}{mark}")
        print(f"  {os.path.relpath(result.folder)}")
        if number:
            for change in version_changes(results[number - 1].manifest, result.manifest):
                print(f"    {change}")


def version_changes(old: Manifest | None, new: Manifest | None) -> list[str]:
    """Describe what changed from one version of a result to the next."""
    if old is None or new is None:
        return ["a manifest cannot be read"]
    changes = spec_changes(old["spec"], new["spec"])
    inputs = old["inputs"]
    changes += [
        f"input {name} had other content"
        for name in sorted(inputs.keys() & new["inputs"].keys())
        if inputs[name]["digest"] != new["inputs"][name]["digest"]
    ]
    if content_digest(old) == content_digest(new):
        changes.append("the files are the same")
    return changes


def format_time(seconds: float) -> str:
    """Return a Unix time in the local time zone, to the minute."""
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


# --- results and what jobs left ---------------------------------------------------------------


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
    def is_interrupted(self) -> bool:
        """Whether a job left checkpoints, from which it may go on."""
        return not self.is_finished and any(state_folder(self.folder).glob("*"))

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


def examine(finished: Iterable[Path], unfinished: Iterable[Path] = ()) -> list[StoredResult]:
    """Return what is in folders of a store, the least recently used first.

    Args:
        finished: Folders of results.
        unfinished: Folders that results would have which jobs make, or made.
    """
    results = []
    folders = *((folder, True) for folder in finished), *((folder, False) for folder in unfinished)
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


# --- gc ---------------------------------------------------------------------------------------


def remove(store: Path, max_bytes: int, interrupted: bool) -> None:
    """Remove results that no root's links lead to, the least recently used ones first.

    interrupted: As for collect.
    """
    names = named_versions(Path("output"))
    started = time.time() - CLOCK_DIFFERENCE
    needed = needed_keys(store, Path("output"))
    removed = collect(store, needed, started, max_bytes, interrupted)
    for result in removed:
        paths = "".join(f": {path}" for path in names.get(result.folder.resolve(), ()))
        print(f"removed {result.id}, last used {format_time(result.used)}{paths}")
    size = format_size(sum(result.num_bytes for result in removed))
    left = examine(stored_folders(store))
    left_size = format_size(sum(result.num_bytes for result in left))
    print(f"{len(removed):,} results removed, {size}; {len(left):,} left, {left_size}")
    unfinished = examine((), unfinished_results(store))
    if kept := [result for result in unfinished if result.is_interrupted]:
        size = format_size(sum(result.num_bytes for result in kept))
        print(
            f"{len(kept):,} unfinished jobs keep their inputs, and checkpoints of {size}: see"
            " --interrupted"
        )


def needed_keys(store: Path, output: Path) -> set[str]:
    """Return the keys of the results that the links of all roots lead to, or that are copied there.

    They count by key and not by folder: a store may have been moved since.

    Takes the arguments of root_links.

    Raises:
        InputError: As root_links does; or a copy has a damaged manifest; or the store has results,
            and nothing leads to one.
    """
    keys: set[str] = set()
    for path in root_links(store, output):
        is_link, file = path.is_symlink(), path if is_manifest(path) else path / MANIFEST
        if is_link:
            keys |= keys_of_link(path)
        elif path.resolve().is_relative_to(store.resolve()):
            continue
        if manifest := read_manifest(file):
            keys.add(result_id(manifest).rpartition("/")[2])
        elif not is_link:
            raise InputError(
                f"{file} is damaged: which result it is a copy of is unknown: delete it, or move it"
                " to another place"
            )
    results = stored_folders(store)
    if results and keys.isdisjoint(folder.name for folder in results):
        raise InputError(
            f"no path leads to a result in {store}: start a build in each folder that uses it,"
            " which links its results; or delete the store, if nobody needs it"
        )
    return keys


def collect(
    store: Path, needed: Collection[str], started: float, max_bytes: int, interrupted: bool = False
) -> list[StoredResult]:
    """Remove the least recently used results, and what killed jobs left, until a store is small.

    Args:
        store: The store.
        needed: Keys of results that stay. So do the inputs of interrupted jobs.
        started: Unix time before these keys were found: what was linked since then stays, too.
        max_bytes: Space that the store may use.
        interrupted: Remove the checkpoints of interrupted jobs, and what they alone need, too.

    Returns:
        What was removed.
    """
    results = examine(stored_folders(store), unfinished_results(store))
    # A job may wait in the queue of a cluster to go on from its checkpoints.
    kept = [each.folder for each in results if each.is_interrupted and not interrupted]
    needed = {*needed, *(key for folder in kept for key in noted_inputs(folder))}
    num_bytes = sum(result.num_bytes for result in results)
    removed = []
    for result in results:
        if num_bytes <= max_bytes:
            break
        is_needed = result.folder.name in needed if result.is_finished else result.folder in kept
        if not is_needed and _delete(result, started):
            removed.append(result)
            num_bytes -= result.num_bytes
    return removed


def _delete(result: StoredResult, started: float) -> bool:
    """Delete a result, renamed first so that nobody finds a part of it; return whether it is gone.

    What a process makes or has linked since the start stays.
    """
    folder = result.folder
    try:
        descriptor = acquire_lock(lock_path(folder))
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return is_full and result.is_finished and _delete_on_full_disk(folder, started)
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


def _delete_on_full_disk(folder: Path, started: float) -> bool:
    """Delete a result where no lock can be made, unless a job has one; as _delete."""
    with suppress(OSError):
        if folder.stat().st_mtime < started:
            # A job of this result makes this folder first. If it exists, this fails.
            os.rename(folder, work_folder(folder))
            delete_work(folder)
            work_folder(folder).rmdir()
            return True
    return False


if __name__ == "__main__":
    main()
