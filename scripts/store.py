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
import os
import time
from pathlib import Path

from snakechat.jobs.stale_causes import spec_changes
from snakechat.workflow.errors import InputError, one_line_errors
from snakechat.workflow.links import linked_folder, named_versions, needed_keys, versions_of
from snakechat.workflow.manifest import MANIFEST, STORE, Manifest, content_digest
from snakechat.workflow.store import (
    StoredResult,
    collect,
    examine,
    format_size,
    interrupted_jobs,
    parse_size,
    stored_results,
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
    results = stored_results(store)
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
    results = examine((folder, True) for folder in versions_of(path))
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
    left = stored_results(store)
    left_size = format_size(sum(result.num_bytes for result in left))
    print(f"{len(removed):,} results removed, {size}; {len(left):,} left, {left_size}")
    if kept := interrupted_jobs(store):
        size = format_size(sum(result.num_bytes for result in kept))
        print(
            f"{len(kept):,} unfinished jobs keep their inputs, and checkpoints of {size}: see"
            " --interrupted"
        )


if __name__ == "__main__":
    main()
