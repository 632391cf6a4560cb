"""Sequence packing: several rows share one packed sequence [T], with a mask that separates them.

A row is a prompt and its responses: one response for SFT, two for a preference pair, any number for
rollouts. It is laid out as prompt | response | response ...: the model processes the prompt once,
responses of a row do not attend to one another, and the positions of each response continue from
the end of the prompt. Several rows, which do not attend to one another, fill a packed sequence.

Packing requires a model that accepts a boolean mask (models.supports_packing). For other models,
each response takes a sequence by itself, after a copy of its prompt and padded on the right, where
causal attention ignores the padding.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from snakechat.modeling.acceleration import copy_to_device, round_up
from snakechat.modeling.attention import Segments, make_segments

Ids = Sequence[int] | np.ndarray
# A row's prompt, and its responses.
Row = tuple[Ids, list[Ids]]

# Rows considered for one micro-batch: enough to fill it, few enough to search.
MAX_CANDIDATES = 1024
# Widths of packed sequences that pack_rows tries, as multiples of the longest row.
WIDTH_FACTORS = (1, 1.25, 1.5, 2)
# Cost of a token outside attention, as the number of attended positions that cost as much. For a
# small model this is 6 times its hidden size.
TOKEN_COST = 4096


class TokenBatch(NamedTuple):
    """A micro-batch as tensors: S sequences (prompt and response) with N target tokens in all.

    The first responses of all rows come first, then all second ones. Indices are into the flattened
    [B * T] positions.

    input_ids: [B, T].
    target_index: [N], each target token, sequence by sequence.
    state_index: [N], the hidden state that predicts each target token.
    last_index: [S], the last token of each sequence.
    target_lengths: [S], the number of target tokens of each sequence.
    attention_mask: ones [B, T]. With packing, position_ids: [B, T], and in the place of the mask
        the segments that define it (attention.packed_arguments).
    """

    input_ids: torch.Tensor
    state_index: torch.Tensor
    target_index: torch.Tensor
    last_index: torch.Tensor
    target_lengths: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    segments: Segments | None = None


def pack_rows(
    sized_rows: list[tuple[int, int]], max_tokens: int, multiple: int = 1
) -> list[list[list[int]]]:
    """Pack rows into micro-batches of at most `max_tokens` tokens, padding included.

    The packed sequences of a micro-batch are as wide as its longest row, or wider by one of
    WIDTH_FACTORS, whichever costs least per token that is not padding.

    Args:
        sized_rows: (row, length) of each row, the longest first.
        multiple: the packed sequences will be padded to a multiple of this number of tokens.

    Returns:
        For each micro-batch its packed sequences, each a list of rows.
    """
    micro_batches = []
    while sized_rows:
        longest = sized_rows[0][1]
        limit = max(max_tokens, round_up(longest, multiple))
        widths = {min(round_up(int(factor * longest), multiple), limit) for factor in WIDTH_FACTORS}
        candidates = [
            first_fit(sized_rows[:MAX_CANDIDATES], width, max_tokens, multiple)
            for width in sorted(widths)
        ]
        packed, remaining, _ = min(candidates, key=lambda candidate: candidate[2])
        micro_batches.append(packed)
        sized_rows = remaining + sized_rows[MAX_CANDIDATES:]
    return micro_batches


def first_fit(
    sized_rows: list[tuple[int, int]], width: int, max_tokens: int, multiple: int = 1
) -> tuple[list[list[int]], list[tuple[int, int]], float]:
    """Fill the packed sequences of one micro-batch by first-fit decreasing (Johnson 1973).

    Each row goes into the first sequence of `width` tokens that has space for it.

    Args:
        sized_rows: (row, length) of each row, the longest first.
        multiple: see pack_rows.

    Returns:
        The packed sequences, the rows that did not fit, and the cost per token without padding.
    """
    free = np.full(max(1, max_tokens // width), width)
    packed: list[list[int]] = [[] for _ in free]
    remaining = []
    for row, length in sized_rows:
        index = int(np.argmax(free >= length))
        if free[index] < length:
            remaining.append((row, length))
            continue
        free[index] -= length
        packed[index].append(row)
    free = free[[bool(rows) for rows in packed]]
    used = width - free
    padded = round_up(used.max(), multiple)
    cost = padded * len(used) * (TOKEN_COST + padded) / used.sum()
    return [rows for rows in packed if rows], remaining, cost


def collate(
    sequences: list[list[Row]],
    packing: bool,
    device: torch.device,
    with_prompts: bool = False,
    multiple: int = 1,
    trained: list[Ids] | None = None,
) -> TokenBatch:
    """Build the tensors of a micro-batch.

    Args:
        sequences: rows of each packed sequence; without packing, one row per entry.
        with_prompts: tokens of the prompt are target tokens too. The first token of a prompt is
            never a target, because no hidden state predicts it.
        multiple: packed sequences are padded to a multiple of this number of tokens. Others are
            not: a family that cannot be packed may have no position for the padding.
        trained: for rows with one response each, which of its tokens are targets: an array of 0 and
            1 of each row, in their order. By default all are.
    """
    if not packing:
        # A sequence for each response, all first responses before all second ones.
        sequences = [
            [(prompt, [responses[number]])]
            for number in range(len(sequences[0][0][1]))
            for [(prompt, responses)] in sequences
        ]
    lengths = [sum(len(p) + sum(map(len, responses)) for p, responses in s) for s in sequences]
    shape = len(sequences), round_up(max(lengths), multiple if packing else 1)
    ids, positions, row_ids, segment_ids = (np.zeros(shape, np.int64) for _ in range(4))
    # Number of the response, flat indices of its sequence, and which of these tokens are targets.
    found: list[tuple[int, np.ndarray, np.ndarray]] = []
    for number, sequence in enumerate(sequences):
        start = 0
        for row, (prompt, responses) in enumerate(sequence, start=1):
            prompt_index = number * shape[1] + np.arange(start, start + len(prompt))
            for segment, part in enumerate((prompt, *responses)):
                columns = np.arange(start, start + len(part))
                ids[number, columns] = part
                positions[number, columns] = columns - start + (len(prompt) if segment else 0)
                row_ids[number, columns], segment_ids[number, columns] = row, segment
                start += len(part)
                if segment == 0:
                    continue
                index = np.concatenate([prompt_index, number * shape[1] + columns])
                targets = np.arange(1 if with_prompts else len(prompt), len(index))
                if trained is not None and not with_prompts:
                    targets = len(prompt) + np.flatnonzero(trained[len(found)])
                found.append((segment, index, targets))
    # All first responses before all second ones.
    found.sort(key=lambda each: each[0])

    def to_device(array: np.ndarray) -> torch.Tensor:
        return copy_to_device(torch.from_numpy(array), device)

    batch = TokenBatch(
        to_device(ids),
        state_index=to_device(np.concatenate([index[targets - 1] for _, index, targets in found])),
        target_index=to_device(np.concatenate([index[targets] for _, index, targets in found])),
        last_index=to_device(np.array([index[-1] for _, index, _ in found])),
        target_lengths=to_device(np.array([len(targets) for *_, targets in found])),
    )
    if packing:
        segments = make_segments(row_ids, segment_ids, to_device)
        return batch._replace(position_ids=to_device(positions), segments=segments)
    # Without a mask, OPT sums one of floats, for which GPUs have no deterministic kernel.
    return batch._replace(attention_mask=torch.ones_like(batch.input_ids))
