"""Find rows of datasets, and every result that was made from them.

    python scripts/find_row.py "Anna Example" --in /backups/models
    python scripts/find_row.py --file requests.txt

Searches all records in output/, earlier versions included, and in the folders of --in, which may
hold copies of results. An argument, or a line of --file, is a text that a row contains, or the
digest of a row (32 hexadecimal digits), by which `exclude` of a dataset removes it.

A result is made from the rows of the phases that its lineage tokenizes, and from those that its
tokenizer was trained on or an LLM judge labelled. The lineage names records and splits by their
content: any copy of them has the rows.

Exits with 0 if a result other than records was made from the rows, or may have been; with 1 if none
was, as after a build that excludes them; with 2 after an error.
"""

import argparse
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from snakechat.data.records import read_digests, read_texts
from snakechat.workflow.errors import InputError, one_line_errors
from snakechat.workflow.links import linked_results
from snakechat.workflow.manifest import (
    MANIFEST,
    Lineage,
    content_digest,
    merge_lineages,
    read_manifest,
)
from snakechat.workflow.store import find_results

DIGEST = re.compile("[0-9a-f]{32}")
# The rules that write records.
RECORD_RULES = {"import_dataset", "select_responses", "label_pairs"}

# What a result was made from: ("rows", the digest of a row that matches), ("phases", the DATASET
# PHASE.SPLIT of such a row) and ("unknown", the path of a result without a copy).
Usage = set[tuple[str, str]]


class Row(NamedTuple):
    """A row of records that matches. number: from 1."""

    digest: str
    split: str
    number: int


@one_line_errors(code=2)
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("query", nargs="*", metavar="TEXT", help="a text or a digest")
    parser.add_argument("--file", type=Path, help="a text or a digest per line")
    parser.add_argument("--in", dest="folders", nargs="+", default=[], type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    words = [*arguments.query, *(lines_of(arguments.file) if arguments.file else ())]
    if not words or "" in words:
        parser.error("give a text, a digest or --file")
    trees = [Path("output"), *arguments.folders]
    for tree in trees:
        if not tree.is_dir():
            raise InputError(f"{tree} is not a folder: correct the path")
    paths = {folder: str(path) for path, folder in linked_results(Path("output"))}
    # The manifest and the content of each result, by the path that leads to it; for a version or a
    # copy, by its folder.
    results = {
        paths.get(folder.resolve(), str(folder)): (folder, manifest, content_digest(manifest))
        for tree in trees
        for folder in find_results(tree)
        if (manifest := read_manifest(folder / MANIFEST))
    }
    records = {
        content: list(matching_rows(folder, words))
        for folder, manifest, content in results.values()
        if manifest["spec"]["rule"] in RECORD_RULES
    }
    phases = {
        content: phase_digests(Path(name).name, folder, records[of_records])
        for name, (folder, manifest, content) in results.items()
        if manifest["spec"]["rule"] == "split_dataset"
        and (of_records := manifest["inputs"]["records"]["digest"]) in records
    }
    found: dict[str, list[Row]] = {}
    for name, (_, manifest, content) in sorted(results.items()):
        jobs, rows = merge_lineages([manifest]), records.get(content, [])
        usage = {("rows", row.digest) for row in rows}
        usage |= {each for job in jobs.values() for each in usage_of(job, jobs, records, phases)}
        if usage:
            found[name] = rows
            print_result(name, usage, rows)
    if not found:
        print("no row matches")
    sys.exit(1 if all(found.values()) else 0)


def lines_of(file: Path) -> list[str]:
    """Return the lines of a file without those that are empty."""
    # Not splitlines, which splits at U+2028, too: it is text.
    lines = file.read_text(encoding="utf-8-sig", errors="surrogateescape").split("\n")
    return [word for line in lines if (word := line.strip(" \t\r"))]


def matching_rows(folder: Path, words: Collection[str]) -> Iterator[Row]:
    """Yield the rows of records that have one of the digests or contain one of the texts."""
    texts = [word for word in words if not DIGEST.fullmatch(word)]
    has_eval = (folder / "eval.parquet").exists()
    for path in sorted(folder.glob("*.parquet")):
        # Without an eval split, some rows of train.parquet are in it.
        split = path.stem if has_eval else "train or eval"
        records = zip(read_digests(path), read_texts(path), strict=True)
        for number, (digest, record) in enumerate(records, start=1):
            found = any(word in text for text in record if text for word in texts)
            if found or digest.hex() in words:
                yield Row(digest.hex(), split, number)


def phase_digests(dataset: str, folder: Path, rows: Sequence[Row]) -> dict[str, set[str]]:
    """Return the digests of the rows that a split has in each phase, by DATASET PHASE.SPLIT."""
    found = {}
    for path in folder.glob("*.npy"):
        numbers, split = set(np.load(path).tolist()), path.stem.rpartition(".")[2]
        found[f"{dataset} {path.stem}"] = {
            row.digest for row in rows if split in row.split and row.number - 1 in numbers
        }
    return found


def usage_of(
    job: Mapping[str, Any], jobs: Lineage, records: dict[str, list[Row]], phases: dict[str, Any]
) -> Usage:
    """Return what a job of a lineage read itself, given matching rows by the content of a result.

    Other jobs than these read no rows, or statistics of them, or write row numbers.
    """
    usage: Usage = set()
    for path in job["inputs"].values():
        rule, content = jobs[path]["rule"], jobs[path]["content"]
        if rule == "split_dataset" and "phase" in job["settings"]:
            usage |= set() if content in phases else {("unknown", path)}
            for name, digests in phases.get(content, {}).items():
                if digests and f" {job['settings']['phase']}." in name:
                    usage |= {("phases", name), *(("rows", digest) for digest in digests)}
        elif rule in RECORD_RULES and job["rule"] in ("init_model", "label_pairs"):
            usage |= set() if content in records else {("unknown", path)}
            # A tokenizer is trained on the rows of the train split.
            split = "train" if job["rule"] == "init_model" else ""
            read = {row.digest for row in records.get(content, ()) if split in row.split}
            usage |= {("rows", each) for each in read.difference(job["facts"].get("excluded", ()))}
    return usage


def print_result(name: str, usage: Usage, rows: Sequence[Row]) -> None:
    """Print a result and what it was made from; of records, the rows that match."""
    found = {kind: sorted(text for each, text in usage if each == kind) for kind, _ in usage}
    phases = f" ({', '.join(found['phases'])})" if "phases" in found else ""
    print(f"{name}: rows: {len(found.get('rows', ())):,}{phases}")
    for row in rows:
        print(f"  {row.digest}  {row.split} row {row.number}")
    for path in found.get("unknown", ()):
        print(f"  unknown: no copy of {path} was found")


if __name__ == "__main__":
    main()
