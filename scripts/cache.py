"""List, trim and verify the cache of finished results.

    python scripts/cache.py list                      # all recipes and how many versions they have
    python scripts/cache.py list output/rlhf/mine     # its versions, and what changed between them
    python scripts/cache.py gc --max-size 500G --older-than 90d
    python scripts/cache.py verify

The folder of a version can be used like a result: with transformers, or with scripts/chat.py. Do
not change its files.
"""

import argparse
import datetime
import re
import sys
from pathlib import Path

from snakechat.planning.changes import replaced_inputs, spec_changes
from snakechat.workflow.command_line import one_line_errors
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import (
    Manifest,
    content_digest,
    manifest_path,
    result_key,
)
from snakechat.workflow.result_cache import Entry, ResultCache, parse_size
from snakechat.workflow.valid_manifests import read_valid_manifest


@one_line_errors()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--cache",
        type=Path,
        default=Path("output/.cache"),
        metavar="FOLDER",
        help="default: output/.cache",
    )
    listing = commands.add_parser("list", parents=[common], help="list results, newest first")
    listing.add_argument("target", nargs="?", help="a result, such as output/rlhf/mine")
    collection = commands.add_parser("gc", parents=[common], help="remove what is not needed")
    collection.add_argument(
        "--max-size",
        metavar="SIZE",
        help="remove the least recently used results until the cache uses at most this space of"
        " its own (500G)",
    )
    collection.add_argument(
        "--older-than", metavar="DAYS", help="remove results that were last used earlier (90d)"
    )
    commands.add_parser("verify", parents=[common], help="read all files and compare digests")
    arguments = parser.parse_args()
    cache = ResultCache(arguments.cache, None)
    if not cache.folder.is_dir():
        raise InputError(f"{cache.folder} does not exist: set --cache to the folder of a cache")
    if arguments.command == "list":
        list_versions(cache, arguments.target) if arguments.target else list_results(cache)
    elif arguments.command == "gc":
        collect(cache, arguments.max_size, arguments.older_than)
    else:
        verify(cache)


# --- list -------------------------------------------------------------------------------------


def list_results(cache: ResultCache) -> None:
    """Print a line for each result of which the cache has versions."""
    versions: dict[str, list[Entry]] = {}
    for entry in cache.entries():
        versions.setdefault(entry.path, []).append(entry)
    for path, entries in sorted(versions.items()):
        size = format_size(sum(entry.num_bytes for entry in entries))
        newest = max(entry.created for entry in entries)
        noun = "version" if len(entries) == 1 else "versions"
        print(f"{format_time(newest)}  {size:>12}  {len(entries):4} {noun:8}  {path}")
    print_total([entry for entries in versions.values() for entry in entries])


def list_versions(cache: ResultCache, target: str) -> None:
    """Print the versions of a result, newest first: when, where, how large, what changed.

    Raises:
        InputError: There are none.
    """
    path = target.rstrip("/").removesuffix(".manifest.json")
    entries = [entry for entry in cache.entries() if entry.path == path]
    if not entries:
        raise InputError(f"no version of {path} in {cache.folder}")
    entries.sort(key=lambda entry: entry.created)
    manifests = [read_valid_manifest(entry.folder / "manifest.json") for entry in entries]
    current = current_key(path)
    for number in reversed(range(len(entries))):
        entry = entries[number]
        mark = "  current" if entry.key == current else ""
        size = format_size(entry.num_bytes)
        print(f"{format_time(entry.created)}  {size:>12}  {entry.host}{mark}")
        print(f"  {entry.folder}")
        if number:
            for change in version_changes(manifests[number - 1], manifests[number]):
                print(f"    {change}")
    if current not in {entry.key for entry in entries}:
        print(f"the cache does not have the current {path}" if current else f"there is no {path}")


def current_key(path: str) -> str | None:
    """Return the key of the result in output/; None if there is none."""
    manifest = read_valid_manifest(manifest_path(path))
    return result_key(manifest["spec"], manifest["inputs"]) if manifest else None


def version_changes(old: Manifest | None, new: Manifest | None) -> list[str]:
    """Describe what changed from one version of a result to the next."""
    if old is None or new is None:
        return ["a manifest cannot be read"]
    try:
        changes = spec_changes(old["spec"], new["spec"], old["facts"])
        changes += replaced_inputs(old["spec"], new["spec"])
    except (KeyError, TypeError, AttributeError):
        return ["was made by another version of Snakechat"]
    inputs = old["spec"]["inputs"]
    changes += [
        f"{inputs[name]['path']} had other content"
        for name in sorted(inputs.keys() & new["spec"]["inputs"].keys())
        if old["inputs"].get(name) != new["inputs"].get(name)
    ]
    if content_digest(old) == content_digest(new):
        changes.append("the files are the same")
    return changes


def format_time(text: str) -> str:
    """Return an ISO time in the local time zone, to the minute."""
    try:
        time = datetime.datetime.fromisoformat(text).astimezone()
    except ValueError:
        return "unknown time    "
    return time.strftime("%Y-%m-%d %H:%M")


def format_size(number: float) -> str:
    """Format bytes in the largest unit of which there is one at least."""
    unit = min(4, (int(number).bit_length() - 1) // 10) if number else 0
    name = ("B", "KiB", "MiB", "GiB", "TiB")[unit]
    return f"{number / (1 << 10 * unit):,.1f} {name}" if unit else f"{number} B"


def print_total(entries: list[Entry]) -> None:
    size = format_size(sum(entry.num_bytes for entry in entries))
    print(f"{len(entries):,} results, {size} (files that output/ shares take no space)")


# --- gc and verify ----------------------------------------------------------------------------


def collect(cache: ResultCache, max_size: str | None, older_than: str | None) -> None:
    """Remove results by size and age.

    Raises:
        InputError: The size or the age is wrong, or both are missing.
    """
    if max_size is None and older_than is None:
        raise InputError("gc needs --max-size, --older-than or both")
    max_bytes = None if max_size is None else parse_size(max_size)
    days = None if older_than is None else parse_days(older_than)
    removed = cache.collect(max_bytes, days)
    for entry in removed:
        print(f"removed {entry.path or entry.key} of {format_time(entry.created)}")
    size = format_size(sum(entry.num_bytes for entry in removed))
    print(f"{len(removed):,} results removed, {size}; {len(cache.entries()):,} left")


def parse_days(text: str) -> int:
    """Return the number of days of an age such as 90d.

    Raises:
        InputError: The text is not an age.
    """
    match = re.fullmatch(r"(\d+)d", text)
    if not match:
        raise InputError(f"{text!r} is not an age: write a number of days, such as 90d")
    return int(match[1])


def verify(cache: ResultCache) -> None:
    """Print what is wrong with the entries, and exit with code 1 if anything is."""
    problems = cache.verify()
    for problem in problems:
        print(problem)
    outcome = f"{len(problems):,} damaged" if problems else "all as recorded"
    print(f"{len(cache.entries()):,} results: {outcome}")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
