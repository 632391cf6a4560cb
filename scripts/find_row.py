"""Find rows of datasets, and every result that was made from them.

    python scripts/find_row.py "Anna Example" --in /backups/models
    python scripts/find_row.py 6b1f0e3a5c9d4b7e8f2a1c0d9e8b7a65
    python scripts/find_row.py --pattern "[a-z]+@example[.]com" --json
    python scripts/find_row.py --file requests.txt

Searches the prompt, chosen and rejected texts of all records in output/, earlier versions included,
and in the folders of --in, which may hold copies of results. An argument, or a line of --file, is
the digest of a row (32 hexadecimal digits) or a text that a row contains. `exclude` of a dataset
removes rows that are given by their digests.

Exits with 0 if a result other than records was made from the rows, or may have been; with 1 if none
was, as after a build that excludes them; with 2 after an error.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snakechat.data.exclusions import DIGEST
from snakechat.data.row_search import (
    RECORD_RULES,
    Match,
    Query,
    Result,
    RowSearch,
    find_results,
)
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import Manifest, content_digest
from snakechat.workflow.printable import printable_line
from snakechat.workflow.store import linked_folder
from snakechat.workflow.tool_errors import one_line_errors

# Matching rows that are printed of each dataset; --json has all of them.
MAX_PRINTED = 20
# Characters of a text that are printed on each side of a match.
CONTEXT = 30


@one_line_errors(code=2)
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("query", nargs="*", metavar="TEXT", help="a text or a digest")
    parser.add_argument("--pattern", metavar="REGEX", help="a regular expression of Python")
    parser.add_argument("--file", type=Path, help="a text or a digest per line")
    parser.add_argument(
        "--in", dest="folders", nargs="+", default=[], type=Path, metavar="FOLDER",
        help="search these folders too",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    arguments = parser.parse_args()
    if not (arguments.query or arguments.pattern or arguments.file):
        parser.error("give a text, a digest, --pattern or --file")
    results = find_results([Path("output"), *arguments.folders])
    found = search(results, query_of(arguments.query, arguments.pattern, arguments.file))
    report(found, arguments.json)
    sys.exit(0 if any(not result["is_records"] for result in found["results"]) else 1)


def query_of(words: Sequence[str], pattern: str | None, file: Path | None) -> Query:
    """Return the query for texts, digests and a pattern.

    Raises:
        InputError: The pattern is not a regular expression, or the file is not a text or is empty.
    """
    words = list(words)
    if file is not None:
        try:
            # Not splitlines, which splits at U+2028 too: it is text.
            lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").split("\n")]
        except UnicodeDecodeError:
            raise InputError(f"{file}: expected a text file") from None
        words += [line for line in lines if line]
        if not words:
            raise InputError(f"{file}: has no text and no digest")
    digests = frozenset(bytes.fromhex(word) for word in words if DIGEST.fullmatch(word))
    patterns = [re.escape(word) for word in words if not DIGEST.fullmatch(word)]
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise InputError(
                f"--pattern {pattern!r} is not a regular expression: {error}"
            ) from None
        patterns.append(f"(?:{pattern})")
    return Query(digests, re.compile("|".join(patterns)) if patterns else None)


def search(results: Sequence[Result], query: Query) -> dict[str, Any]:
    """Return the matching rows of each dataset, their phases, and the results made from them."""
    found = RowSearch(results, query)
    rows: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    phases, used = {}, []
    for folder, manifest in results:
        spec, content = manifest["spec"], content_digest(manifest)
        if matches := found.matches.get(content):
            dataset = rows.setdefault(spec["name"], {})
            dataset |= {(match.split, match.number): describe(match, query) for match in matches}
        if spec["rule"] == "split_dataset" and content in found.phases:
            counts = {name: len(rows) for name, rows in found.phases[content].items() if rows}
            phases[shown_path(folder, manifest)] = counts
        usage = found.usage(manifest)
        if usage.rows or usage.unknown:
            used.append(
                {
                    "folder": shown_path(folder, manifest),
                    "rows": sorted(digest.hex() for digest in usage.rows),
                    "phases": sorted(usage.phases),
                    "unknown": sorted(usage.unknown),
                    "is_records": spec["rule"] in RECORD_RULES,
                }
            )
    datasets = {name: [entries[key] for key in sorted(entries)] for name, entries in rows.items()}
    return {"rows": datasets, "phases": phases, "results": used}


def shown_path(folder: Path, manifest: Manifest) -> str:
    """Return the path of a result that leads to a folder of the store, or else the folder."""
    path = manifest["spec"]["path"]
    return path if linked_folder(path) == folder else str(folder)


def describe(match: Match, query: Query) -> dict[str, Any]:
    """Return a matching row with the surroundings of its match."""
    excerpt = ""
    if match.text and query.pattern and (place := query.pattern.search(match.text)):
        start, end = max(0, place.start() - CONTEXT), place.end() + CONTEXT
        excerpt = match.text[start:end][: 4 * CONTEXT]
    return {
        "split": match.split,
        "row": match.number + 1,
        "digest": match.digest.hex(),
        "excerpt": excerpt,
    }


def report(found: dict[str, Any], as_json: bool) -> None:
    """Print what was found."""
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return
    if not found["rows"]:
        print("no row matches")
    for dataset, rows in found["rows"].items():
        print(f"dataset {dataset}: {count(len(rows))}")
        for row in rows[:MAX_PRINTED]:
            place = f"{row['digest']}  {row['split']} row {row['row']}"
            print(f"  {place}  {printable_line(row['excerpt'])}".rstrip())
        if len(rows) > MAX_PRINTED:
            print(f"  and {len(rows) - MAX_PRINTED:,} more (--json lists all)")
    for folder, counts in found["phases"].items():
        if counts:
            print(f"{folder}: {', '.join(f'{name} {n:,}' for name, n in counts.items())}")
    for result in found["results"]:
        print(f"  {describe_result(result)}")


def describe_result(result: dict[str, Any]) -> str:
    """Return a line about a result that was, or may have been, made from matching rows."""
    line = result["folder"]
    if result["rows"]:
        phases = f" ({', '.join(result['phases'])})" if result["phases"] else ""
        line += f": {count(len(result['rows']))}{phases}"
    if result["unknown"]:
        line += f": unknown, because no copy of its {', '.join(result['unknown'])} was found"
    return line


def count(rows: int) -> str:
    return "1 row" if rows == 1 else f"{rows:,} rows"


if __name__ == "__main__":
    main()
