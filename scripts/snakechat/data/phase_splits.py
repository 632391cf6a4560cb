"""The rows of each phase: disjoint random subsets of a dataset, determined by the seed."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

PHASES = ("sft", "reward", "rlhf")
# The phase whose rows a rule tokenizes. As in DeepSpeed-Chat, DPO has the rows of the reward phase.
PHASE_OF_RULE = {
    "tokenize_sft": "sft",
    "tokenize_reward": "reward",
    "tokenize_dpo": "reward",
    "tokenize_rlhf": "rlhf",
    "tokenize_generations": "rlhf",
}


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


def split_rows(
    rows: int, weights: Sequence[float], seed: int, max_rows: int | None = None
) -> list[np.ndarray]:
    """Split rows among phases.

    Phases are consecutive slices of the permutation that DeepSpeed-Chat draws, or of its first
    max_rows entries.

    Returns:
        For each phase the row numbers (int64) in the order of the permutation.
    """
    order = np.arange(rows, dtype=np.int64)
    np.random.RandomState(seed).shuffle(order)
    order = order[:max_rows]
    bounds = np.cumsum([0, *phase_sizes(len(order), weights)])
    return [order[start:end] for start, end in pairwise(bounds)]


def split_groups(
    groups: np.ndarray, weights: Sequence[float], seed: int, max_rows: int | None = None
) -> list[np.ndarray]:
    """Split groups of rows among phases, so that each group belongs to one phase.

    Args:
        groups: Group of each row, as a number.
        weights: Relative numbers of groups of the phases.
        seed: Seed of the permutation of groups.
        max_rows: Upper bound on the number of rows. Groups that do not fit are skipped.

    Returns:
        For each phase its ascending row numbers (int64).
    """
    # Number groups by first appearance, so that the split does not depend on the values.
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    order = np.arange(len(first), dtype=np.int64)
    np.random.RandomState(seed).shuffle(order)
    order = np.argsort(first)[order]
    if max_rows is not None:
        order = _groups_within(order, np.bincount(group), max_rows)
    bounds = np.cumsum([0, *phase_sizes(len(order), weights)])
    return [
        np.flatnonzero(np.isin(group, order[start:end])).astype(np.int64)
        for start, end in pairwise(bounds)
    ]


def _groups_within(order: np.ndarray, sizes: np.ndarray, max_rows: int) -> np.ndarray:
    """Take groups in order; skip each group that exceeds the remaining number of rows."""
    selected = []
    for group in order:
        if sizes[group] <= max_rows:
            selected.append(group)
            max_rows -= sizes[group]
    return np.array(selected, dtype=np.int64)


def weighted_rows(rows: np.ndarray, weight: float, seed: int) -> np.ndarray:
    """Repeat rows `weight` times: all rows for its integral part, a random subset for the rest."""
    if weight == 1:
        return rows
    repeats, fraction = divmod(weight, 1)
    subset = np.random.default_rng(seed).permutation(rows)[: round(fraction * len(rows))]
    return np.sort(np.concatenate([np.repeat(rows, int(repeats)), subset]))
