"""Rows that `exclude` of a dataset removes: it names them by digests, also in files.

They are removed after the split (scripts/split_dataset.py), so that no other row changes its phase.
What else reads whole records, such as the training of a tokenizer, removes the same rows.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from snakechat.data.records import read_digests
from snakechat.workflow.errors import InputError
from snakechat.workflow.external_files import planned_files
from snakechat.workflow.job import Job

DIGEST = re.compile("[0-9a-f]{32}")


def removed_rows(
    job: Job[Any], settings: Mapping[str, Any], paths: Mapping[str, Path], dataset: str
) -> dict[str, np.ndarray]:
    """Return the ascending numbers of the rows of each split that a dataset removes.

    Their digests are recorded in job.facts.

    Args:
        job: The job, with the spec, the options and the facts.
        settings: The part of the spec that may have `exclude`, a list of digests.
        paths: The records of each split.
        dataset: Name of the dataset, for errors.

    Raises:
        InputError: No row has a digest that the config names; or a file of digests changed
            since it was planned, or has a line that is not a digest.
    """
    if "exclude" not in settings:
        return dict.fromkeys(paths, np.empty(0, np.int64))
    named = frozenset(map(bytes.fromhex, settings["exclude"]))
    files = {Path(path): name for name, path in job.options.excluded_files.items()}
    with planned_files({path: job.spec["files"][name] for path, name in files.items()}):
        listed = frozenset(digest for path in files for digest in read_digest_list(path))
    digests = {split: read_digests(path) for split, path in paths.items()}
    present = frozenset().union(*digests.values())
    if missing := sorted(named - present):
        raise InputError(
            f"config: datasets.{dataset}.exclude: {missing[0].hex()} is the digest of no row of"
            f" {dataset}: python scripts/find_row.py finds digests"
        )
    # The files may also list rows of other datasets.
    excluded = (named | listed) & present
    job.facts["excluded"] = sorted(digest.hex() for digest in excluded)
    rows = {
        split: [number for number, digest in enumerate(found) if digest in excluded]
        for split, found in digests.items()
    }
    print(f"{dataset}: {sum(map(len, rows.values())):,} rows excluded")
    return {split: np.array(numbers, np.int64) for split, numbers in rows.items()}


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
