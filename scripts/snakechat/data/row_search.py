"""Which rows match a query, and which results were made from them.

A result is made from the rows of the phases that its lineage tokenizes, from all rows of a dataset
that its tokenizer was trained on, and from those that an LLM judge labelled. The lineage names the
split by its content: the row numbers are read from any copy of it, in output/ or in a store. If
there is no copy, a result is made from the same rows as another one with the same content.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from snakechat.data.phase_splits import PHASE_OF_RULE, PHASES, SPLITS
from snakechat.data.records import read_digests, read_texts
from snakechat.workflow.errors import InputError
from snakechat.workflow.lineage import Lineage, merge_lineages
from snakechat.workflow.manifest import MANIFEST, Manifest, content_digest, read_manifest

# The rules that write records.
RECORD_RULES = {"import_dataset", "select_responses", "label_pairs"}

# Digests of rows.
Rows = frozenset[bytes]


class Query(NamedTuple):
    """Rows to find: those with one of the digests, and those with a match in one of their texts."""

    digests: Rows
    pattern: re.Pattern[str] | None


class Match(NamedTuple):
    """A row that matches: its split, its number from 0, its digest and the text that matches."""

    split: str
    number: int
    digest: bytes
    text: str


class Result(NamedTuple):
    """A result folder, or a copy of one."""

    folder: Path
    manifest: Manifest


class Usage(NamedTuple):
    """What a result was made from.

    Attributes:
        rows: Digests of the matching rows.
        phases: DATASET PHASE.SPLIT of the phases that have them.
        unknown: Paths of upstream results whose content is nowhere to be read.
    """

    rows: Rows
    phases: frozenset[str]
    unknown: frozenset[str]


NOTHING = Usage(frozenset(), frozenset(), frozenset())


def find_results(trees: Iterable[Path]) -> list[Result]:
    """Return all results in folders and their subfolders, which may be stores.

    Raises:
        InputError: A folder does not exist.
    """
    results = []
    for tree in trees:
        if not tree.is_dir():
            raise InputError(f"there is no folder {tree}")
        for folder, folders, files in os.walk(tree):
            folders.sort()
            manifest = read_manifest(Path(folder, MANIFEST)) if MANIFEST in files else None
            if manifest is not None:
                folders.clear()
                results.append(Result(Path(folder), manifest))
    return results


def _matches(path: Path, query: Query) -> Iterator[Match]:
    """Yield the rows of the records of a split that match."""
    digests, pattern = read_digests(path), query.pattern
    # The texts are read only for a pattern.
    records: Iterable[Iterable[str | None]] = (
        read_texts(path) if pattern else repeat((), len(digests))
    )
    for number, (digest, record) in enumerate(zip(digests, records, strict=True)):
        texts = (text for text in record if text and pattern and pattern.search(text))
        text = next(texts, "")
        if text or digest in query.digests:
            yield Match(path.stem, number, digest, text)


class RowSearch:
    """The rows that match a query in some results, and the results that were made from them.

    Attributes:
        matches: Matching rows of each content of records.
        phases: Digests of the matching rows of each phase and split, such as "sft.train", of each
            content of a split.
    """

    def __init__(self, results: Iterable[Result], query: Query) -> None:
        self.matches: dict[str, list[Match]] = {}
        self.phases: dict[str, dict[str, Rows]] = {}
        self._manifests: dict[str, list[Manifest]] = {}
        results = list(results)
        splits: dict[str, list[Path]] = {}
        for folder, manifest in results:
            content = content_digest(manifest)
            self._manifests.setdefault(content, []).append(manifest)
            if manifest["spec"]["rule"] in RECORD_RULES and content not in self.matches:
                splits[content] = sorted(folder.glob("*.parquet"))
                self.matches[content] = [
                    match for path in splits[content] for match in _matches(path, query)
                ]
        for folder, manifest in results:
            content = content_digest(manifest)
            if manifest["spec"]["rule"] != "split_dataset" or content in self.phases:
                continue
            records = manifest["inputs"]["records"]
            if records in self.matches:
                has_eval = len(splits[records]) == len(SPLITS)
                self.phases[content] = self._phases(folder, records, has_eval)

    def _phases(self, folder: Path, records: str, has_eval: bool) -> dict[str, Rows]:
        phases = {}
        for split in SPLITS:
            # Without an eval split, its rows are among those of train.parquet.
            source = split if has_eval else "train"
            found = [match for match in self.matches[records] if match.split == source]
            numbers = np.array([match.number for match in found], np.int64)
            for phase in PHASES:
                rows = np.load(folder / f"{phase}.{split}.npy", allow_pickle=False)
                used = np.isin(numbers, rows)
                phases[f"{phase}.{split}"] = frozenset(
                    match.digest for match, is_used in zip(found, used, strict=True) if is_used
                )
        return phases

    def usage(self, manifest: Manifest) -> Usage:
        """Return which of the matching rows a result was made from."""
        jobs, own = merge_lineages([manifest]), manifest["spec"]["path"]
        usages = [self._usage_of_job(job, jobs) for job in jobs.values()]
        if jobs[own]["rule"] in RECORD_RULES:
            usages.append(self._records(own, jobs))
        return union(usages)

    def _usage_of_job(self, job: Mapping[str, Any], jobs: Lineage) -> Usage:
        """Return which of the matching rows a job of a lineage read itself."""
        usage = self._read_by(job, jobs)
        if usage.unknown:
            # Another result with the same content was made from the same rows.
            for manifest in self._manifests.get(job["content"], ()):
                others = merge_lineages([manifest])
                other = self._read_by(others[manifest["spec"]["path"]], others)
                if not other.unknown:
                    return other
        return usage

    def _read_by(self, job: Mapping[str, Any], jobs: Lineage) -> Usage:
        inputs = {path: jobs[path]["rule"] for path in job["inputs"]}
        if job["rule"] in PHASE_OF_RULE:
            splits = [path for path, rule in inputs.items() if rule == "split_dataset"]
            return union(self._phase(PHASE_OF_RULE[job["rule"]], path, jobs) for path in splits)
        if job["rule"] not in ("init_model", "label_pairs"):
            # It reads no rows, or statistics of them, or writes row numbers.
            return NOTHING
        records = [path for path, rule in inputs.items() if rule in RECORD_RULES]
        # A tokenizer is trained on the rows of the train split.
        read = SPLITS[:1] if job["rule"] == "init_model" else SPLITS
        usage = union(self._records(path, jobs, read) for path in records)
        excluded = frozenset(map(bytes.fromhex, job["facts"].get("excluded", ())))
        return usage._replace(rows=usage.rows - excluded)

    def _phase(self, phase: str, path: str, jobs: Lineage) -> Usage:
        found = self.phases.get(jobs[path]["content"])
        if found is None:
            return NOTHING._replace(unknown=frozenset([path]))
        rows = {name: found[name] for name in (f"{phase}.train", f"{phase}.eval") if found[name]}
        names = frozenset(f"{jobs[path]['name']} {name}" for name in rows)
        return Usage(frozenset().union(*rows.values()), names, frozenset())

    def _records(self, path: str, jobs: Lineage, splits: Collection[str] = SPLITS) -> Usage:
        found = self.matches.get(jobs[path]["content"])
        if found is None:
            return NOTHING._replace(unknown=frozenset([path]))
        return NOTHING._replace(rows=frozenset(m.digest for m in found if m.split in splits))


def union(usages: Iterable[Usage]) -> Usage:
    """Return what several results together were made from."""
    rows, phases, unknown = zip(NOTHING, *usages, strict=True)
    return Usage(rows[0].union(*rows), phases[0].union(*phases), unknown[0].union(*unknown))
