"""Find rows of datasets, and every result that was made from them.

    python scripts/find_row.py "Anna Example" --in /backups/models
    python scripts/find_row.py --file requests.txt

Searches all records in output/, earlier versions included, and in the folders of --in, which may
hold copies of results. An argument, or a line of --file, is a text that a row contains, or the
digest of a row (32 hexadecimal digits), by which `exclude` of a dataset removes it.

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

from snakechat.data.phase_splits import PHASES, SPLITS
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
# PHASE.SPLIT of such a row) and ("unknown", the path of a result of which there is no copy).
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
    search = Search([Path("output"), *arguments.folders], words)
    results = sorted(search.results(), key=lambda result: result[0])
    for name, usage, rows in results:
        found = {kind: sorted(text for each, text in usage if each == kind) for kind, _ in usage}
        phases = f" ({', '.join(found['phases'])})" if "phases" in found else ""
        print(f"{name}: rows: {len(found.get('rows', ())):,}{phases}")
        for row in rows:
            print(f"  {row.digest}  {row.split} row {row.number}")
        for path in found.get("unknown", ()):
            print(f"  unknown: no copy of {path} was found")
    if not results:
        print("no row matches")
    sys.exit(0 if any(not rows for _, _, rows in results) else 1)


def lines_of(file: Path) -> list[str]:
    """Return the lines of a file without those that are empty."""
    # Not splitlines, which splits at U+2028, too: it is text.
    lines = file.read_text(encoding="utf-8-sig", errors="surrogateescape").split("\n")
    return [word for line in lines if (word := line.strip(" \t\r"))]


class Search:
    """The rows that have a digest or contain a text, and the results that were made from them.

    A result is made from the rows of the phases that its lineage tokenizes, and from those that its
    tokenizer was trained on or an LLM judge labelled. The lineage names records and splits by their
    content: any copy of them has the rows.
    """

    def __init__(self, trees: Sequence[Path], words: Collection[str]) -> None:
        # The matching rows by the content of their records, and the digests of these rows by the
        # content of a split and by DATASET PHASE.SPLIT.
        self._records: dict[str, list[Row]] = {}
        self._phases: dict[str, dict[str, set[str]]] = {}
        self._names = {folder: str(path) for path, folder in linked_results(Path("output"))}
        for tree in trees:
            if not tree.is_dir():
                raise InputError(f"there is no folder {tree}")
        self._manifests = {
            folder: manifest
            for tree in trees
            for folder in find_results(tree)
            if (manifest := read_manifest(folder / MANIFEST))
        }
        for folder, manifest in self._manifests.items():
            if manifest["spec"]["rule"] in RECORD_RULES:
                self._records[content_digest(manifest)] = list(matching_rows(folder, words))
        for folder, manifest in self._manifests.items():
            records = manifest["inputs"].get("records", {}).get("digest")
            if manifest["spec"]["rule"] == "split_dataset" and records in self._records:
                self._phases[content_digest(manifest)] = {
                    f"{Path(self._name(folder)).name} {phase}.{split}": digests_of(
                        folder / f"{phase}.{split}.npy", split, self._records[records]
                    )
                    for phase in PHASES
                    for split in SPLITS
                }

    def results(self) -> Iterator[tuple[str, Usage, list[Row]]]:
        """Yield the results that were made from the rows, or may have been.

        Yields:
            The path, what it was made from, and of records the matching rows.
        """
        for folder, manifest in self._manifests.items():
            jobs = merge_lineages([manifest])
            rows = self._records.get(content_digest(manifest), [])
            usage: Usage = {("rows", row.digest) for row in rows}
            usage = usage.union(*(self._usage(job, jobs) for job in jobs.values()))
            if usage:
                yield self._name(folder), usage, rows

    def _name(self, folder: Path) -> str:
        """Return the path that leads to a result; for a version or a copy, its folder."""
        return self._names.get(folder.resolve(), str(folder))

    def _usage(self, job: Mapping[str, Any], jobs: Lineage) -> Usage:
        """Return what a job of a lineage read itself.

        Other jobs than these read no rows, or statistics of them, or write row numbers.
        """
        usage: Usage = set()
        for path in job["inputs"].values():
            upstream = jobs[path]
            if upstream["rule"] == "split_dataset" and "phase" in job["settings"]:
                phases = self._phases.get(upstream["content"])
                usage |= {("unknown", path)} if phases is None else set()
                for name, digests in (phases or {}).items():
                    if digests and f" {job['settings']['phase']}." in name:
                        usage |= {("phases", name), *(("rows", digest) for digest in digests)}
            elif upstream["rule"] in RECORD_RULES and job["rule"] in ("init_model", "label_pairs"):
                rows = self._records.get(upstream["content"])
                usage |= {("unknown", path)} if rows is None else set()
                # A tokenizer is trained on the rows of the train split.
                split = "train" if job["rule"] == "init_model" else ""
                read = {row.digest for row in rows or () if split in row.split}
                usage |= {
                    ("rows", each) for each in read.difference(job["facts"].get("excluded", ()))
                }
        return usage


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


def digests_of(path: Path, split: str, rows: Sequence[Row]) -> set[str]:
    """Return the digests of the matching rows whose numbers a file of a phase and split has."""
    numbers = set(np.load(path, allow_pickle=False).tolist())
    return {row.digest for row in rows if split in row.split and row.number - 1 in numbers}


if __name__ == "__main__":
    main()
