"""Which rows of a dataset belong to which phase: disjoint shares, drawn once by the seed."""

from itertools import pairwise

import numpy as np

PHASES = ("sft", "reward", "rlhf")


def phase_sizes(number, weights):
    """Sizes of the phases' shares of a number of rows, as DeepSpeed-Chat rounds them.

    Bounds are cumulated round(share * number), shifted so that the last one is number; none goes
    below 0, where DeepSpeed-Chat repeats rows (data_utils.py, lines 85-129). What rounding leaves
    goes to phases that have a weight.
    """
    weights = np.asarray(weights, dtype=np.float64)
    counts, weighted = np.zeros(len(weights), dtype=np.int64), weights > 0
    bounds = np.cumsum([0, *(round(w / weights.sum() * number) for w in weights[weighted])])
    bounds[1:] -= bounds[-1] - number
    counts[weighted] = np.diff(bounds.clip(min=0))
    return counts.tolist()


def split_rows(number, weights, seed, max_rows=None):
    """Rows of each phase, as they are drawn: disjoint arrays of numbers below `number`.

    Cut from the permutation that DeepSpeed-Chat draws, or from its first max_rows.
    """
    order = np.arange(number, dtype=np.int64)
    np.random.RandomState(seed).shuffle(order)
    order = order[:max_rows]
    bounds = np.cumsum([0, *phase_sizes(len(order), weights)])
    return [order[start:end] for start, end in pairwise(bounds)]


def split_groups(groups, weights, seed, max_rows=None):
    """As share_rows, but rows of the same group stay together: groups are what is shared.

    groups: a number for each row, equal for rows that belong together. With max_rows, groups are
    taken as long as all their rows fit.
    """
    # Numbered as they first appear, whatever the numbers of the groups are.
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    order = np.arange(len(first), dtype=np.int64)
    np.random.RandomState(seed).shuffle(order)
    order = np.argsort(first)[order]
    if max_rows is not None:
        order = _that_fit(order, np.bincount(group), max_rows)
    bounds = np.cumsum([0, *phase_sizes(len(order), weights)])
    return [
        np.flatnonzero(np.isin(group, order[start:end])).astype(np.int64)
        for start, end in pairwise(bounds)
    ]


def _that_fit(order, phase_sizes, room):
    """Groups in this order, without those that are larger than the room left to them."""
    fitting = []
    for group in order:
        if phase_sizes[group] <= room:
            fitting.append(group)
            room -= phase_sizes[group]
    return np.array(fitting, dtype=np.int64)


def weighted_rows(rows, weight, seed):
    """Rows taken `weight` times: all of them for its whole part, a random share for the rest."""
    if weight == 1:
        return rows
    whole, part = divmod(weight, 1)
    drawn = np.random.default_rng(seed).permutation(rows)[: round(part * len(rows))]
    return np.sort(np.concatenate([np.repeat(rows, int(whole)), drawn]))
