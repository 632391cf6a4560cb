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

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from snakechat.data.records import read_digests, read_texts
from snakechat.workflow.errors import InputError, one_line_errors, tool_parser
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


class Row(NamedTuple):
    """A row that matches. split: of records, or DATASET PHASE.SPLIT. number: from 1."""

    digest: str
    split: str
    number: int


@one_line_errors(code=2)
def main() -> None:
    parser = tool_parser(__doc__)
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
    # By the content of records, and of splits, whose rows are among the rows of records.
    rows = {
        content: list(matching_rows(folder, words))
        for folder, manifest, content in results.values()
        if manifest["spec"]["rule"] in RECORD_RULES
    }
    for name, (folder, manifest, content) in results.items():
        records = manifest["inputs"].get("records", {}).get("digest")
        if manifest["spec"]["rule"] == "split_dataset" and records in rows:
            rows[content] = list(phase_rows(Path(name).name, folder, rows[records]))
    are_made = []
    for name, (_, manifest, content) in sorted(results.items()):
        own = rows[content] if manifest["spec"]["rule"] in RECORD_RULES else []
        used, unknown = usage_of(manifest, rows)
        digests = {row.digest for row in (*own, *used)}
        if digests or unknown:
            are_made.append(not own)
            phases = ", ".join(sorted({row.split for row in used if "." in row.split}))
            print(
                f"{name}: rows: {len(digests):,}{f' ({phases})' if phases else ''}",
                *(f"  {row.digest}  {row.split} row {row.number}" for row in own),
                *(f"  unknown: no copy of {path} was found" for path in sorted(unknown)),
                sep="\n",
            )
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


def phase_rows(dataset: str, folder: Path, rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows that a split has in each phase."""
    for path in folder.glob("*.npy"):
        numbers, split = set(np.load(path).tolist()), path.stem.rpartition(".")[2]
        in_phase = (row for row in rows if split in row.split and row.number - 1 in numbers)
        yield from (row._replace(split=f"{dataset} {path.stem}") for row in in_phase)


def usage_of(manifest: Manifest, rows: Mapping[str, Sequence[Row]]) -> tuple[set[Row], set[str]]:
    """Return the rows that a result was made from, and missing files.

    Missing files are records and splits that the lineage names and the store does not contain.
    Other jobs of its lineage read no rows, or statistics of them, or write row numbers.

    rows: The rows that match, by the content of records and splits.
    """
    jobs = merge_lineages([manifest])
    used, unknown = set[Row](), set[str]()
    for job, path in [(each, path) for each in jobs.values() for path in each["inputs"].values()]:
        rule, content, settings = jobs[path]["rule"], jobs[path]["content"], job["settings"]
        part = READ_SPLITS.get(job["rule"]) if rule in RECORD_RULES else None
        if rule == "split_dataset" and "phase" in settings:
            part = f" {settings['phase']}."
        if part is None:
            continue
        if content not in rows:
            unknown.add(path)
        excluded = settings.get("tokenizer", settings).get("exclude", ())
        used |= {
            row for row in rows.get(content, ()) if part in row.split and row.digest not in excluded
        }
    return used, unknown


if __name__ == "__main__":
    main()
