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

import datetime
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from snakechat.jobs.stale_causes import spec_changes
from snakechat.workflow.errors import InputError, one_line_errors, tool_parser
from snakechat.workflow.links import linked_folder, named_versions, paths_by_key, versions_of
from snakechat.workflow.manifest import (
    MANIFEST,
    STORE,
    content_digest,
    read_manifest,
    read_run_record,
)
from snakechat.workflow.store import (
    KEY,
    AlreadyLocked,
    delete_work,
    format_size,
    locked,
    parse_size,
    size_of,
    stored_folders,
    work_path,
)


@one_line_errors()
def main() -> None:
    parser = tool_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="list results, newest first")
    listing.add_argument("target", nargs="?", help="a result, such as output/rlhf/mine")
    collection = commands.add_parser("gc", help="remove what no build uses")
    collection.add_argument(
        "--max-size", required=True, metavar="SIZE", help="space that the store may take: 500G"
    )
    collection.add_argument(
        "--interrupted",
        action="store_true",
        help="remove the checkpoints of interrupted jobs and what they alone need, too",
    )
    for command in (listing, collection):
        command.add_argument(
            "--store", type=Path, default=STORE, metavar="FOLDER", help=f"default: {STORE}"
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


class Entry(NamedTuple):
    """A result in a store, or what a job makes or made when it was killed.

    Attributes:
        folder: Its folder, or the one that it would have; named after its key.
        is_finished: Whether it is a result.
        num_bytes: The size of its files.
        used: Unix time at which it was made, or a path was linked to it last.
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

    def made(self) -> tuple[float, str]:
        """Return the Unix time at which it was made, and the machine."""
        record = read_run_record(self.folder)
        if record is None:
            return self.used, "unknown"
        started = datetime.datetime.fromisoformat(record["started"])
        return started.timestamp() + record["seconds"], record["host"]


def examine(folders: Iterable[Path], is_finished: bool = True) -> Iterator[Entry]:
    """Yield the results in folders of a store, or what jobs make or left of them."""
    for folder in folders:
        place = folder if is_finished else work_path(folder)
        # Another process may remove it, on another machine too (ESTALE).
        with suppress(OSError):
            # A job that runs changes what is in its folder.
            places = [place] if is_finished else [place, *place.iterdir()]
            used = max(path.stat().st_mtime for path in places)
            yield Entry(folder, is_finished, size_of(place), used)


def total_of(entries: Iterable[Entry]) -> str:
    """Return the size of results."""
    return format_size(sum(entry.num_bytes for entry in entries))


def format_time(seconds: float) -> str:
    """Return a Unix time in the local time zone, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


# --- list -------------------------------------------------------------------------------------


def list_results(store: Path) -> None:
    """Print a line for each result with the number of its versions."""
    names = named_versions(Path("output"))
    versions: dict[str, list[Entry]] = {}
    entries = [*examine(stored_folders(store))]
    for entry in entries:
        # A result without a name belongs to another output folder.
        for path in names.get(entry.folder.resolve(), [entry.id]):
            versions.setdefault(path, []).append(entry)
    for path, stored in sorted(versions.items()):
        newest, _ = max(entry.made() for entry in stored)
        number = f"{len(stored):4} {'version' if len(stored) == 1 else 'versions':8}"
        print(f"{format_time(newest)}  {total_of(stored):>12}  {number}  {path}")
    print(f"{len(entries):,} results, {total_of(entries)}")


def list_versions(target: str) -> None:
    """Print the versions of a result, newest first: when, where, how large, what changed."""
    path = target.rstrip("/").removesuffix(f".{MANIFEST}")
    entries = sorted(examine(versions_of(Path(path))), key=Entry.made)
    if not entries:
        raise InputError(f"no version of {path}")
    current = linked_folder(path)
    for number, entry in reversed(list(enumerate(entries))):
        made, host = entry.made()
        mark = "  current" if entry.folder == current else ""
        changes = changes_since(entries[number - 1].folder, entry.folder) if number else []
        print(
            f"{format_time(made)}  {format_size(entry.num_bytes):>12}  {host}{mark}",
            f"  {os.path.relpath(entry.folder)}",
            *(f"    {change}" for change in changes),
            sep="\n",
        )


def changes_since(earlier: Path, later: Path) -> list[str]:
    """Describe what changed between two versions of a result, given their folders."""
    old, new = (read_manifest(folder / MANIFEST) for folder in (earlier, later))
    if old is None or new is None:
        return ["a manifest cannot be read"]
    inputs = [
        f"input {name} had other content"
        for name, before in sorted(old["inputs"].items())
        if before["digest"] != new["inputs"].get(name, before)["digest"]
    ]
    is_same = content_digest(old) == content_digest(new)
    same = ["the files are the same"] if is_same else []
    return [*spec_changes(old["spec"], new["spec"]), *inputs, *same]


# --- gc ---------------------------------------------------------------------------------------


def remove(store: Path, max_bytes: int, interrupted: bool) -> None:
    """Remove results that no root's links lead to; raise InputError where that is unknown."""
    # The clock of a file server may be 2 seconds behind.
    started = time.time() - 2
    needed = paths_by_key(store, Path("output"))
    results = stored_folders(store)
    if results and needed.keys().isdisjoint(folder.name for folder in results):
        raise InputError(
            f"no path leads to a result in {store}: start a build in each folder that uses it,"
            " which links its results; or delete the store, if nobody needs it"
        )
    collect(store, needed, started, max_bytes, interrupted)


def collect(
    store: Path, needed: Iterable[str], started: float, max_bytes: int, interrupted: bool = False
) -> list[Entry]:
    """Remove the least recently used results, and what killed jobs left, until a store is small.

    Prints and returns what was removed.

    needed: Keys of results that stay. So do the inputs of interrupted jobs.
    started: Unix time before these keys were found: what was linked since then stays, too.
    interrupted: Remove the checkpoints of interrupted jobs, and what they alone need, too.
    """
    names, keys = named_versions(Path("output")), set(needed)
    unfinished = [*examine(stored_folders(store, is_finished=False), is_finished=False)]
    entries = [*examine(stored_folders(store)), *unfinished]
    # A job may wait in the queue of a cluster to go on from its checkpoints.
    kept = [
        entry
        for entry in unfinished
        if not interrupted and any(work_path(entry.folder, "state").glob("*"))
    ]
    for entry in kept:
        with suppress(FileNotFoundError):
            keys |= {*KEY.findall(work_path(entry.folder, "inputs").read_text())}
    removed, num_bytes = [], sum(entry.num_bytes for entry in entries)
    for entry in sorted(entries, key=lambda entry: (entry.used, entry.folder)):
        is_needed = entry.folder.name in keys if entry.is_finished else entry in kept
        if num_bytes > max_bytes and not is_needed and _delete(entry, started):
            removed.append(entry)
            num_bytes -= entry.num_bytes
            paths = "".join(f": {path}" for path in names.get(entry.folder.resolve(), ()))
            print(f"removed {entry.id}, last used {format_time(entry.used)}{paths}")
    left = [entry for entry in entries if entry.is_finished and entry.folder.is_dir()]
    print(
        f"{len(removed):,} results removed, {total_of(removed)};"
        f" {len(left):,} left, {total_of(left)}"
    )
    if kept:
        print(
            f"{len(kept):,} unfinished jobs keep their inputs, and checkpoints of {total_of(kept)}:"
            " see --interrupted"
        )
    return removed


def _delete(entry: Entry, started: float) -> bool:
    """Delete a result, renamed first so that nobody finds a part of it; return whether it is gone.

    What a process makes or has linked since the start stays.
    """
    folder = entry.folder
    with suppress(OSError, AlreadyLocked):
        if not entry.is_finished:
            with locked(folder):
                delete_work(folder)
            return True
        if folder.stat().st_mtime < started:
            # A job of this result makes this folder first: then this fails. No lock, which a full
            # disk has no space for.
            os.rename(folder, work_path(folder))
            delete_work(folder)
            return True
    return False


if __name__ == "__main__":
    main()
