"""Find rows of datasets, and every result that was made from them.

    python scripts/find_row.py "Anna Example" --in /backups/models
    python scripts/find_row.py --file requests.txt --json

Searches all records in output/, earlier versions included, and in the folders of --in, which may
hold copies of results. An argument, or a line of --file, is a text that a row contains, or the
digest of a row (32 hexadecimal digits), by which `exclude` of a dataset removes it.

Exits with 0 if a result other than records was made from the rows, or may have been; with 1 if none
was, as after a build that excludes them; with 2 after an error.
"""

import argparse
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from snakechat.data.phase_splits import PHASES, SPLITS
from snakechat.data.records import read_digests, read_texts
from snakechat.workflow.errors import InputError, one_line_errors
from snakechat.workflow.links import linked_results, named_versions
from snakechat.workflow.manifest import (
    MANIFEST,
    Lineage,
    Manifest,
    content_digest,
    merge_lineages,
    read_manifest,
    result_id,
)
from snakechat.workflow.store import find_results

NAMES = [f"{phase}.{split}" for phase in PHASES for split in SPLITS]
DIGEST = re.compile("[0-9a-f]{32}")
# The rules that write records.
RECORD_RULES = {"import_dataset", "select_responses", "label_pairs"}

# What a result was made from: ("rows", the digest of a row that matches), ("phases", the DATASET
# PHASE.SPLIT of such a row) and ("unknown", the path of a result of which there is no copy).
Usage = set[tuple[str, str]]
KINDS = ("rows", "phases", "unknown")


@one_line_errors(code=2)
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("query", nargs="*", metavar="TEXT", help="a text or a digest")
    parser.add_argument("--file", type=Path, help="a text or a digest per line")
    parser.add_argument("--in", dest="folders", nargs="+", default=[], type=Path, metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    arguments = parser.parse_args()
    words = [*arguments.query, *(lines_of(arguments.file) if arguments.file else ())]
    if not words or "" in words:
        parser.error("give a text, a digest or --file")
    search = Search([Path("output"), *arguments.folders], words)
    results = list(search.results())
    found = {"rows": search.rows, "results": results}
    text = "\n".join(report(search.rows, results)) or "no row matches"
    print(json.dumps(found, indent=1, ensure_ascii=False) if arguments.json else text)
    sys.exit(0 if any(not result["is_records"] for result in results) else 1)


def lines_of(file: Path) -> list[str]:
    """Return the lines of a file without those that are empty."""
    # Not splitlines, which splits at U+2028, too: it is text.
    lines = file.read_text(encoding="utf-8-sig", errors="surrogateescape").split("\n")
    return [word for line in lines if (word := line.strip(" \t\r"))]


def report(rows: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines about what was found."""
    for dataset, matches in rows.items():
        yield f"dataset {dataset}: rows: {len(matches):,}"
        yield from (f"  {each['digest']}  {each['split']} row {each['row']}" for each in matches)
    for result in results:
        phases = f" ({', '.join(result['phases'])})" if result["phases"] else ""
        yield f"  {result['folder']}: rows: {len(result['rows']):,}{phases}"
        yield from (f"    unknown: there is no copy of {path}" for path in result["unknown"])


class Search:
    """The rows that have a digest or contain a text, and the results that were made from them.

    A result is made from the rows of the phases that its lineage tokenizes, and from those that its
    tokenizer was trained on or an LLM judge labelled. The lineage names records and splits by their
    content: any copy of them has the rows. Without a copy, a result was made from the same rows as
    another one with the same content.

    Attributes:
        rows: The split, the number from 1 and the digest of the matching rows of each dataset.
    """

    def __init__(self, trees: Sequence[Path], words: Collection[str]) -> None:
        found: dict[str, dict[str, dict[str, Any]]] = {}
        # Of the content of records, the matching rows; of that of a split, their digests by DATASET
        # PHASE.SPLIT.
        self._records: dict[str, list[dict[str, Any]]] = {}
        self._phases: dict[str, dict[str, set[str]]] = {}
        self._manifests: dict[Path, Manifest] = {}
        # The paths that lead to folders of the store; earlier versions have names too.
        self._paths = {folder: str(path) for path, folder in linked_results(Path("output"))}
        names = named_versions(Path("output"))

        def dataset_of(folder: Path) -> str:
            return names.get(folder.resolve(), [str(folder)])[0].rpartition("/")[2]

        for tree in trees:
            if not tree.is_dir():
                raise InputError(f"there is no folder {tree}")
            for folder in find_results(tree):
                if manifest := read_manifest(folder / MANIFEST):
                    self._manifests[folder] = manifest
        for folder, manifest in self._manifests.items():
            if manifest["spec"]["rule"] in RECORD_RULES:
                matches = list(matching_rows(folder, words))
                self._records[content_digest(manifest)] = matches
                # Versions of a dataset have most rows in common.
                found.setdefault(dataset_of(folder), {}).update(
                    (str(match), match) for match in matches
                )
        self.rows = {name: list(matches.values()) for name, matches in found.items() if matches}
        for folder, manifest in self._manifests.items():
            records = manifest["inputs"].get("records", {}).get("digest")
            if manifest["spec"]["rule"] == "split_dataset" and records in self._records:
                self._phases[content_digest(manifest)] = {
                    f"{dataset_of(folder)} {name}": digests_of(folder, name, self._records[records])
                    for name in NAMES
                }

    def results(self) -> Iterator[dict[str, Any]]:
        """Yield the results that were made from the rows, or may have been."""
        for folder, manifest in self._manifests.items():
            jobs, is_records = merge_lineages([manifest]), manifest["spec"]["rule"] in RECORD_RULES
            usage = self._read(result_id(manifest), jobs) if is_records else set()
            usage = usage.union(*(self._usage(job, jobs) for job in jobs.values()))
            if usage:
                lists = {key: sorted(text for kind, text in usage if kind == key) for key in KINDS}
                shown = self._paths.get(folder.resolve(), str(folder))
                yield {"folder": shown, **lists, "is_records": is_records}

    def _usage(self, job: Mapping[str, Any], jobs: Lineage) -> Usage:
        """Return what a job of a lineage read itself."""
        usage = self._read_by(job, jobs)
        for manifest in self._manifests.values() if "unknown" in dict(usage) else ():
            if content_digest(manifest) == job["content"]:
                others = merge_lineages([manifest])
                other = self._read_by(others[result_id(manifest)], others)
                if "unknown" not in dict(other):
                    return other
        return usage

    def _read_by(self, job: Mapping[str, Any], jobs: Lineage) -> Usage:
        usage: Usage = set()
        for path in job["inputs"].values():
            upstream = jobs[path]
            if upstream["rule"] == "split_dataset" and "phase" in job["settings"]:
                phases = self._phases.get(upstream["content"])
                usage |= {("unknown", path)} if phases is None else set()
                for name, digests in (phases or {}).items():
                    phase = name.rpartition(" ")[2].partition(".")[0]
                    if digests and phase == job["settings"]["phase"]:
                        usage.add(("phases", name))
                        usage |= {("rows", digest) for digest in digests}
            # Other jobs read no rows, or statistics of them, or write row numbers.
            elif upstream["rule"] in RECORD_RULES and job["rule"] in ("init_model", "label_pairs"):
                # A tokenizer is trained on the rows of the train split.
                read = self._read(path, jobs, "train" if job["rule"] == "init_model" else "")
                usage |= read - {("rows", digest) for digest in job["facts"].get("excluded", ())}
        return usage

    def _read(self, path: str, jobs: Lineage, split: str = "") -> Usage:
        matches = self._records.get(jobs[path]["content"])
        if matches is None:
            return {("unknown", path)}
        return {("rows", match["digest"]) for match in matches if split in match["split"]}


def matching_rows(folder: Path, words: Collection[str]) -> Iterator[dict[str, Any]]:
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
                yield {"split": split, "row": number, "digest": digest.hex()}


def digests_of(folder: Path, name: str, matches: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the digests of the matching rows of records in a PHASE.SPLIT of a split."""
    numbers = set(np.load(folder / f"{name}.npy", allow_pickle=False).tolist())
    rows = (match for match in matches if name.partition(".")[2] in match["split"])
    return {match["digest"] for match in rows if match["row"] - 1 in numbers}


if __name__ == "__main__":
    main()
