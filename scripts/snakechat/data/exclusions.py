"""Rows that `exclude` of a dataset removes: it names them by digests, in files, or by patterns.

They are removed after the split (scripts/split_dataset.py), so that no other row changes its phase.
What else reads whole records, such as the training of a tokenizer, removes the same rows.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from snakechat.data.records import read_digests, read_texts
from snakechat.workflow.digests import digest
from snakechat.workflow.errors import InputError
from snakechat.workflow.external_files import planned_files
from snakechat.workflow.job import Job
from snakechat.workflow.run_options import RunOptions

DIGEST = re.compile("[0-9a-f]{32}")


class Exclusions(NamedTuple):
    """What a dataset excludes.

    Attributes:
        digests: Digests of rows that the config names, each of which has to exist.
        listed: Digests in files, which may also list rows of other datasets.
        patterns: Rows with a match in one of their texts are excluded.
    """

    digests: frozenset[bytes]
    listed: frozenset[bytes]
    patterns: tuple[re.Pattern[str], ...]


class ExcludedRows(NamedTuple):
    """The excluded rows of one file of records.

    Attributes:
        numbers: Ascending row numbers (int64).
        digests: Digest of each of them.
        found: The digests among `digests` and `listed` of the exclusions that the file has.
    """

    numbers: np.ndarray
    digests: list[bytes]
    found: frozenset[bytes]


def load_exclusions(
    settings: dict[str, Any], files: dict[str, str], options: RunOptions
) -> Exclusions:
    """Return what a job excludes.

    Args:
        settings: `exclude` of the spec: the digests of `rows`, and the digest and the reason of
            each of the `patterns`.
        files: The sha256 of the external files of the job.
        options: The patterns, and the path of each file of digests.

    Raises:
        InputError: A file changed since it was planned, or a line of it is not a digest.
    """
    patterns = options.excluded_patterns
    assert [digest(pattern) for pattern in patterns] == [
        pattern["sha256"] for pattern in settings["patterns"]
    ]
    planned = {Path(path): files[name] for name, path in options.excluded_files.items()}
    with planned_files(planned):
        listed = frozenset(row for path in planned for row in read_digest_list(path))
    return Exclusions(
        frozenset(map(bytes.fromhex, settings["rows"])), listed, tuple(map(re.compile, patterns))
    )


def read_digest_list(path: Path) -> list[bytes]:
    """Return the digests in a text file, one per line; # starts a comment.

    Raises:
        InputError: The file is not text, or a line is not a digest.
    """
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError:
        raise InputError(f"{path}: expected a text file with a digest per line") from None
    digests = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if not DIGEST.fullmatch(text):
            raise InputError(
                f"{path}: line {number}: expected the digest of a row (32 hexadecimal digits, as"
                f" scripts/find_row.py prints them), found {text[:40]!r}"
            )
        digests.append(bytes.fromhex(text))
    return digests


def excluded_rows(path: Path, exclusions: Exclusions) -> ExcludedRows:
    """Return the rows of a file of records that are excluded."""
    digests = read_digests(path)
    named = exclusions.digests | exclusions.listed
    numbers = {number for number, digest in enumerate(digests) if digest in named}
    found = frozenset(digests[number] for number in numbers)
    if exclusions.patterns:
        numbers.update(
            number
            for number, texts in enumerate(read_texts(path))
            if any(matches(pattern, texts) for pattern in exclusions.patterns)
        )
    rows = sorted(numbers)
    return ExcludedRows(np.array(rows, np.int64), [digests[row] for row in rows], found)


def matches(pattern: re.Pattern[str], texts: Iterable[str | None]) -> bool:
    """Return whether a pattern matches somewhere in one of the texts of a record."""
    return any(text is not None and pattern.search(text) for text in texts)


def removed_rows(
    job: Job[Any], settings: Mapping[str, Any], paths: Mapping[str, Path], dataset: str
) -> dict[str, np.ndarray]:
    """Return the ascending numbers of the rows of each split that a dataset removes.

    Args:
        job: The job, as in exclude_rows.
        settings: The part of the spec that may have `exclude`.
        paths: The records of each split.
        dataset: Name of the dataset, for errors.

    Raises:
        InputError: As exclude_rows.
    """
    if "exclude" not in settings:
        return dict.fromkeys(paths, np.empty(0, np.int64))
    return exclude_rows(job, settings["exclude"], paths, dataset)


def exclude_rows(
    job: Job[Any], settings: dict[str, Any], paths: Mapping[str, Path], dataset: str
) -> dict[str, np.ndarray]:
    """Return the numbers of the excluded rows of each split, and record their digests in job.facts.

    Args:
        job: The job, with the spec, the options and the facts.
        settings: `exclude` of the spec.
        paths: The records of each split.
        dataset: Name of the dataset, for errors.

    Raises:
        InputError: A digest that the config names is that of no row.
    """
    exclusions = load_exclusions(settings, job.spec["files"], job.options)
    rows = {split: excluded_rows(path, exclusions) for split, path in paths.items()}
    found = frozenset().union(*(split.found for split in rows.values()))
    if missing := sorted(exclusions.digests - found):
        raise InputError(
            f"config: datasets.{dataset}.exclude: {missing[0].hex()} is the digest of no row of"
            f" {dataset}: python scripts/find_row.py finds digests"
        )
    if exclusions.listed:
        present = len(exclusions.listed & found)
        print(f"{present:,} of {len(exclusions.listed):,} listed digests are rows of {dataset}")
    digests = {digest.hex() for split in rows.values() for digest in split.digests}
    job.facts["excluded"] = sorted(digests)
    number = sum(len(split.numbers) for split in rows.values())
    print(f"{dataset}: {number:,} rows excluded")
    return {split: excluded.numbers for split, excluded in rows.items()}
