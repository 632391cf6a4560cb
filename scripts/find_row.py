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
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from snakechat.data.records import read_digests, read_texts
from snakechat.workflow.errors import InputError, one_line_errors
from snakechat.workflow.links import find_results
from snakechat.workflow.manifest import (
    MANIFEST,
    Manifest,
    content_digest,
    merge_lineages,
    read_manifest,
)

# The rules that write records, and the split of these (all: "") that other rules read themselves.
RECORD_RULES = {"import_dataset", "select_responses", "label_pairs"}
READ_SPLITS = {"init_model": "train", "label_pairs": ""}

# The digests of the rows that match: in each split of records, or each DATASET PHASE.SPLIT.
Places = dict[str, set[str]]


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
    parser.add_argument("--file", type=lines_of, default=[], help="a text or a digest per line")
    parser.add_argument("--in", dest="folders", nargs="+", default=[], type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    words = [*arguments.query, *arguments.file]
    if not words or "" in words:
        parser.error("give a text, a digest or --file")
    trees = [Path("output"), *arguments.folders]
    if missing := [tree for tree in trees if not tree.is_dir()]:
        raise InputError(f"{missing[0]} is not a folder: correct the path")
    # By the path that leads to a result; for an earlier version, by its folder.
    results = {
        str(path): (folder, manifest, content_digest(manifest))
        for tree in trees
        for path, folder in find_results(tree).items()
        if (manifest := read_manifest(folder / MANIFEST))
    }
    # By the content of the result.
    records, places = dict[str, list[Row]](), dict[str, Places]()
    for folder, manifest, content in results.values():
        if manifest["spec"]["rule"] in RECORD_RULES:
            records[content], places[content] = list(matching_rows(folder, words)), {}
            for row in records[content]:
                places[content].setdefault(row.split, set()).add(row.digest)
    for name, (folder, manifest, content) in results.items():
        if manifest["spec"]["rule"] == "split_dataset":
            of_records = manifest["inputs"]["records"]["digest"]
            if of_records in records:
                places[content] = phase_places(Path(name).name, folder, records[of_records])
    are_made = []
    for name, (_, manifest, content) in sorted(results.items()):
        rows = records.get(content, [])
        digests, phases, unknown = usage_of(manifest, places)
        digests |= {row.digest for row in rows}
        if digests or unknown:
            are_made.append(not rows)
            listed = f" ({', '.join(sorted(phases))})" if phases else ""
            print(f"{name}: rows: {len(digests):,}{listed}")
            for row in rows:
                print(f"  {row.digest}  {row.split} row {row.number}")
            for path in sorted(unknown):
                print(f"  unknown: no copy of {path} was found")
    if not are_made:
        print("no row matches")
    sys.exit(0 if any(are_made) else 1)


def lines_of(path: str | Path) -> list[str]:
    """Return the lines of a file without those that are empty."""
    # Not splitlines, which splits at U+2028, too: it is text.
    lines = Path(path).read_text(encoding="utf-8-sig", errors="surrogateescape").split("\n")
    return [word for line in lines if (word := line.strip(" \t\r"))]


def matching_rows(folder: Path, words: Collection[str]) -> Iterator[Row]:
    """Yield the rows of records that have one of the words as digest or in a text."""
    has_eval = (folder / "eval.parquet").exists()
    for path in sorted(folder.glob("*.parquet")):
        # Without an eval split, some rows of train.parquet are in it.
        split = path.stem if has_eval else "train or eval"
        records = zip(read_digests(path), read_texts(path), strict=True)
        for number, (digest, record) in enumerate(records, start=1):
            found = any(word in text for text in record if text for word in words)
            if found or digest.hex() in words:
                yield Row(digest.hex(), split, number)


def phase_places(dataset: str, folder: Path, rows: Sequence[Row]) -> Places:
    """Return the digests of the rows that a split has in each phase."""
    found = {}
    for path in folder.glob("*.npy"):
        numbers, split = set(np.load(path).tolist()), path.stem.rpartition(".")[2]
        found[f"{dataset} {path.stem}"] = {
            row.digest for row in rows if split in row.split and row.number - 1 in numbers
        }
    return found


def usage_of(
    manifest: Manifest, places: Mapping[str, Places]
) -> tuple[set[str], set[str], set[str]]:
    """Return the digests of the rows that a result was made from, their phases, and missing files.

    Missing files are records and splits that the lineage names and the store does not contain.

    Other jobs of its lineage read no rows, or statistics of them, or write row numbers.

    places: The rows that match, by the content of records and splits.
    """
    jobs = merge_lineages([manifest])
    rows, phases, unknown = set[str](), set[str](), set[str]()
    for job, path in [(each, path) for each in jobs.values() for path in each["inputs"].values()]:
        rule, content, settings = jobs[path]["rule"], jobs[path]["content"], job["settings"]
        part = READ_SPLITS.get(job["rule"]) if rule in RECORD_RULES else None
        if is_split := rule == "split_dataset" and "phase" in settings:
            part = f" {settings['phase']}."
        if part is None:
            continue
        if content not in places:
            unknown.add(path)
        excluded = settings.get("tokenizer", settings).get("exclude", ())
        for name, digests in places.get(content, {}).items():
            if part in name and (read := digests.difference(excluded)):
                rows |= read
                phases |= {name} if is_split else set()
    return rows, phases, unknown


if __name__ == "__main__":
    main()
