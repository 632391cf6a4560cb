"""The rows of each phase: disjoint random subsets of a dataset, determined by the seed.

Rows that `exclude` of a dataset names are removed after the split, so that no other row changes its
phase. What else reads whole records, such as the training of a tokenizer, removes the same rows.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from snakechat.data.records import KEPT, PROMPT, read_digests
from snakechat.workflow.errors import InputError
from snakechat.workflow.job import Job

SPLITS = ("train", "eval")
PHASES = ("sft", "reward", "rlhf")


def phase_sizes(rows: int, weights: Sequence[float]) -> list[int]:
    """Return the number of rows of each phase, rounded as in DeepSpeed-Chat.

    The bounds are cumulated round(weight * rows), shifted so that the last bound is `rows`
    (DeepSpeed-Chat, data_utils.py, lines 85-129). In contrast to DeepSpeed-Chat, no bound is
    negative, which would repeat rows, and phases of weight 0 get no rows.
    """
    normalized = np.asarray(weights, dtype=np.float64)
    counts, weighted = np.zeros(len(normalized), dtype=np.int64), normalized > 0
    bounds = np.cumsum([0, *(round(w / normalized.sum() * rows) for w in normalized[weighted])])
    bounds[1:] -= bounds[-1] - rows
    counts[weighted] = np.diff(bounds.clip(min=0))
    return counts.tolist()


def split_rows(groups: np.ndarray, weights: Sequence[float], seed: int) -> list[np.ndarray]:
    """Split rows among phases, so that the rows of a group belong to one phase.

    Phases are consecutive slices of DeepSpeed-Chat's permutation, if each row is a group.

    Args:
        groups: Group of each row, as a number.
        weights: Relative numbers of groups of the phases.
        seed: Seed of the permutation of groups.

    Returns:
        For each phase its row numbers (int64), in the order of the permutation.
    """
    # Number groups by first appearance, so that the split does not depend on the values.
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    order = np.arange(len(first), dtype=np.int64)
    np.random.RandomState(seed).shuffle(order)
    place = np.argsort(np.argsort(first)[order])[group]
    rows = np.argsort(place, kind="stable").astype(np.int64)
    bounds = np.cumsum([0, *phase_sizes(len(order), weights)])
    return [rows[start:end] for start, end in pairwise(np.searchsorted(place[rows], bounds))]


def limited_phases(
    phases: Sequence[np.ndarray], removed: np.ndarray, weights: Sequence[float], max_rows: int
) -> list[np.ndarray]:
    """Return the first rows of each phase that are not removed, at most max_rows in all.

    Rows stay in the phase that they have without a limit, and each removed row is replaced by the
    next one of its phase.
    """
    phases = [rows[~np.isin(rows, removed)] for rows in phases]
    if sum(map(len, phases)) <= max_rows:
        return phases
    return [rows[:size] for rows, size in zip(phases, phase_sizes(max_rows, weights), strict=True)]


def weighted_rows(rows: np.ndarray, weight: float, seed: int | None) -> np.ndarray:
    """Repeat rows `weight` times: all rows for its integral part, a random subset for the rest.

    The seed may be None if the weight is integral.
    """
    repeats, fraction = divmod(weight, 1)
    subset = np.random.default_rng(seed).permutation(rows)[: round(fraction * len(rows))]
    return np.sort(np.concatenate([np.repeat(rows, int(repeats)), subset]))


def removed_rows(
    job: Job[Any], settings: Mapping[str, Any], paths: Mapping[str, Path]
) -> dict[str, np.ndarray]:
    """Return the ascending numbers of the rows of each split that a dataset removes.

    Args:
        settings: The part of the spec that may have `exclude`, a list of digests.
        paths: The records of each split.

    Raises:
        InputError: No row has one of the digests.
    """
    if "exclude" not in settings:
        return dict.fromkeys(paths, np.empty(0, np.int64))
    excluded, dataset = set(map(bytes.fromhex, settings["exclude"])), dataset_name(job)
    digests = {split: read_digests(path) for split, path in paths.items()}
    if missing := sorted(excluded.difference(*digests.values())):
        raise InputError(
            f"config: datasets.{dataset}.exclude: {missing[0].hex()} is the digest of no row of"
            f" {dataset}: python scripts/find_row.py finds digests"
        )
    rows = {
        split: np.flatnonzero([digest in excluded for digest in found])
        for split, found in digests.items()
    }
    print(f"{dataset}: {sum(map(len, rows.values())):,} rows excluded")
    return rows


def phase_rows(job: Job[Any], split: str) -> dict[int, np.ndarray]:
    """Return the row numbers of the phase by the number of the dataset, from 1.

    Training rows are repeated by the weight of their dataset.
    """
    phase, rows = job.settings.phase, {}
    for dataset, weight in enumerate(job.settings.weights, start=1):
        numbers = np.load(job.inputs[f"rows.{dataset}"] / f"{phase}.{split}.npy")
        if split == "train":
            numbers = weighted_rows(numbers, weight, job.settings.seed)
        rows[dataset] = numbers
    return rows


def dataset_name(job: Job[Any], records: str = "records") -> str:
    """Return the name of a dataset, for people: it does not determine the result."""
    name: str = job.spec["inputs"][records]["name"]
    return name


def kept_names(job: Job[Any], split: str) -> list[str]:
    """Return the names of the columns that records of RLHF keep for reward functions."""
    if job.settings.fields != [PROMPT]:
        return []
    datasets = range(1, len(job.settings.weights) + 1)
    schemas = [pq.read_schema(records_path(job, dataset, split)) for dataset in datasets]
    columns = {name for schema in schemas for name in schema.names if name.startswith(KEPT)}
    return sorted(name.removeprefix(KEPT) for name in columns)


def records_path(job: Job[Any], dataset: int, split: str) -> Path:
    """Return the records of a split. Without an eval split, its rows are in train.parquet."""
    path = job.inputs[f"records.{dataset}"] / f"{split}.parquet"
    return path if path.exists() else path.with_stem("train")
