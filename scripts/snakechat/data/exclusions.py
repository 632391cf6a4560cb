"""Rows that `exclude` of a dataset removes: it names them by digests.

They are removed after the split (scripts/split_dataset.py), so that no other row changes its phase.
What else reads whole records, such as the training of a tokenizer, removes the same rows.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from snakechat.data.records import read_digests
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job


def removed_rows(
    job: Job[Any], settings: Mapping[str, Any], paths: Mapping[str, Path], dataset: str
) -> dict[str, np.ndarray]:
    """Return the ascending numbers of the rows of each split that a dataset removes.

    Their digests are recorded in job.facts.

    Args:
        job: The job, with the facts.
        settings: The part of the spec that may have `exclude`, a list of digests.
        paths: The records of each split.
        dataset: Name of the dataset, for errors.

    Raises:
        InputError: No row has one of the digests.
    """
    if "exclude" not in settings:
        return dict.fromkeys(paths, np.empty(0, np.int64))
    excluded = frozenset(map(bytes.fromhex, settings["exclude"]))
    digests = {split: read_digests(path) for split, path in paths.items()}
    if missing := sorted(excluded.difference(*digests.values())):
        raise InputError(
            f"config: datasets.{dataset}.exclude: {missing[0].hex()} is the digest of no row of"
            f" {dataset}: python scripts/find_row.py finds digests"
        )
    job.facts["excluded"] = sorted(digest.hex() for digest in excluded)
    rows = {
        split: np.flatnonzero([digest in excluded for digest in found])
        for split, found in digests.items()
    }
    print(f"{dataset}: {sum(map(len, rows.values())):,} rows excluded")
    return rows
