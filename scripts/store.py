"""List and trim a store of results.

    python scripts/store.py list                      # all results and how many versions they have
    python scripts/store.py list output/rlhf/mine     # its versions, and what changed between them
    python scripts/store.py gc --max-size 500G

The folder of a version can be used like a result: with transformers, or with scripts/chat.py. Do
not change its files. scripts/verify.py reads them all and compares their digests.
"""

import argparse
import datetime
from pathlib import Path

from snakechat.jobs.stale_causes import spec_changes
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import MANIFEST, Manifest, content_digest, read_manifest
from snakechat.workflow.store import STORE, linked_folder, linked_folders
from snakechat.workflow.store_space import StoredResult, collect, parse_size, stored_results
from snakechat.workflow.tool_errors import one_line_errors


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
    collection = commands.add_parser("gc", parents=[common], help="remove earlier versions")
    collection.add_argument(
        "--max-size",
        required=True,
        metavar="SIZE",
        help="remove the least recently used results until they use at most this space (500G)",
    )
    arguments = parser.parse_args()
    if not arguments.store.is_dir():
        raise InputError(f"{arguments.store} does not exist: set --store to the folder of a store")
    if arguments.command == "gc":
        remove(arguments.store, parse_size(arguments.max_size))
    elif arguments.target:
        list_versions(arguments.store, arguments.target)
    else:
        list_results(arguments.store)


# --- list -------------------------------------------------------------------------------------


def list_results(store: Path) -> None:
    """Print a line for each result with the number of its versions."""
    versions: dict[str, list[StoredResult]] = {}
    results = stored_results(store)
    for result in results:
        versions.setdefault(result.path, []).append(result)
    for path, stored in sorted(versions.items()):
        size = format_size(sum(result.num_bytes for result in stored))
        newest = max(result.made for result in stored)
        noun = "version" if len(stored) == 1 else "versions"
        print(f"{format_time(newest)}  {size:>12}  {len(stored):4} {noun:8}  {path}")
    size = format_size(sum(result.num_bytes for result in results))
    print(f"{len(results):,} results, {size}")


def list_versions(store: Path, target: str) -> None:
    """Print the versions of a result, newest first: when, where, how large, what changed.

    Raises:
        InputError: There are none.
    """
    path = target.rstrip("/").removesuffix(f".{MANIFEST}")
    results = [result for result in stored_results(store) if result.path == path]
    if not results:
        raise InputError(f"no version of {path} in {store}")
    results.sort(key=lambda result: result.made)
    current = linked_folder(path)
    manifests = [read_manifest(result.folder / MANIFEST) for result in results]
    for number in reversed(range(len(results))):
        result = results[number]
        mark = "  current" if current and result.folder.name == current.name else ""
        size = format_size(result.num_bytes)
        print(f"{format_time(result.made)}  {size:>12}  {result.host}{mark}")
        print(f"  {result.folder}")
        if number:
            for change in version_changes(manifests[number - 1], manifests[number]):
                print(f"    {change}")


def version_changes(old: Manifest | None, new: Manifest | None) -> list[str]:
    """Describe what changed from one version of a result to the next."""
    if old is None or new is None:
        return ["a manifest cannot be read"]
    changes = spec_changes(old["spec"], new["spec"])
    inputs = old["spec"]["inputs"]
    changes += [
        f"{inputs[name]['path']} had other content"
        for name in sorted(inputs.keys() & new["spec"]["inputs"].keys())
        if old["inputs"].get(name) != new["inputs"].get(name)
    ]
    if content_digest(old) == content_digest(new):
        changes.append("the files are the same")
    return changes


def format_time(seconds: float) -> str:
    """Return a Unix time in the local time zone, to the minute."""
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def format_size(number: float) -> str:
    """Format bytes in the largest unit of which there is one at least."""
    unit = min(4, (int(number).bit_length() - 1) // 10) if number else 0
    name = ("B", "KiB", "MiB", "GiB", "TiB")[unit]
    return f"{number / (1 << 10 * unit):,.1f} {name}" if unit else f"{number} B"


# --- gc ---------------------------------------------------------------------------------------


def remove(store: Path, max_bytes: int) -> None:
    """Remove results that no path in output/ leads to, the least recently used ones first."""
    removed = collect(store, linked_folders(Path("output")), max_bytes)
    for result in removed:
        print(f"removed {result.path}, last used {format_time(result.used)}")
    size = format_size(sum(result.num_bytes for result in removed))
    print(f"{len(removed):,} results removed, {size}; {len(stored_results(store)):,} left")


if __name__ == "__main__":
    main()
