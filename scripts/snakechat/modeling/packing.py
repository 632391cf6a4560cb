"""Sequence packing: several rows share one packed sequence [T], with a mask that separates them.

A row is a prompt and its responses: one response for SFT, two for a preference pair, any number for
rollouts. It is laid out as prompt | response | response ...: the model processes the prompt once,
responses of a row do not attend to one another, and the positions of each response continue from
the end of the prompt. Several rows, which do not attend to one another, fill a packed sequence.

Packing requires a model that accepts a boolean mask (models.supports_packing); forward.py narrows
it for layers with a sliding window. For other models, each response takes a sequence by itself,
after a copy of its prompt and padded on the right, where causal attention ignores the padding.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from snakechat.modeling import acceleration
from snakechat.modeling.acceleration import copy_to_device, round_up
from snakechat.modeling.shared_prompts import Group, are_long

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


class Segments(NamedTuple):
    """What attention masks of packed sequences are made of, for a kernel without a dense mask.

    row_ids, segment_ids: [B, T], see packed_attention_mask. boundaries: int32 [N + 1], where rows
    and padding begin and end in the flattened [B * T] positions; None if responses share prompts.
    longest: tokens of the longest row or padding. groups: where the parts of rows are, on a CPU.
    """

    row_ids: torch.Tensor
    segment_ids: torch.Tensor
    boundaries: torch.Tensor | None
    longest: int
    groups: list[Group] | None = None


class ModelInputs(NamedTuple):
    """Arguments of a model's forward pass.

    input_ids: [B, T]. attention_mask: ones [B, T]. With packing position_ids: [B, T], and
    attention_mask: bool [B, 1, T, T], True where a token (third dimension) attends to another
    (fourth). If the placement allows other kernels than SDPA, or long responses share prompts,
    segments take its place until the model is known (forward.attention_arguments).
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor | None = None
    attention_mask: torch.Tensor | None = None
    segments: Segments | None = None


class TokenBatch(NamedTuple):
    """A micro-batch as tensors: S sequences (prompt and response) with N target tokens in all.

    The first responses of all rows come first, then all second ones. Indices are into the flattened
    [B * T] positions.

    target_index: [N], each target token, sequence by sequence.
    state_index: [N], the hidden state that predicts each target token.
    last_index: [S], the last token of each sequence.
    target_lengths: [S], the number of target tokens of each sequence.
    """

    inputs: ModelInputs
    state_index: torch.Tensor
    target_index: torch.Tensor
    last_index: torch.Tensor
    target_lengths: torch.Tensor


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
        with_prompts: target tokens include those of the prompt. The first token of a prompt is
            never a target, because no hidden state predicts it.
        multiple: packed sequences are padded to a multiple of this number of tokens. Others are
            not: a family that cannot be packed may have no position for the padding.
        trained: for rows with one response each, which of its tokens are targets: an array of 0 and
            1 of each row, in their order. By default all are.
    """
    num_responses = len(sequences[0][0][1])
    if not packing:
        sequences = _one_response_each(sequences, num_responses)
    lengths = [sum(len(p) + sum(map(len, responses)) for p, responses in s) for s in sequences]
    shape = len(sequences), round_up(max(lengths), multiple if packing else 1)
    ids, positions, row_ids, segment_ids = (np.zeros(shape, np.int64) for _ in range(4))
    # Flat indices of each sequence of prompt and response, by the response's number.
    indices: list[list[np.ndarray]] = [[] for _ in range(num_responses if packing else 1)]
    groups: list[Group] = []
    for number, sequence in enumerate(sequences):
        start = 0
        for row, (prompt, responses) in enumerate(sequence, start=1):
            prompt_columns = np.arange(start, start + len(prompt))
            segments = [(prompt_columns, prompt, 0, 0)]
            start += len(prompt)
            for segment, response in enumerate(responses, start=1):
                columns = np.arange(start, start + len(response))
                segments.append((columns, response, segment, len(prompt)))
                index = number * shape[1] + np.concatenate([prompt_columns, columns])
                indices[segment - 1].append(index)
                start += len(response)
            spans = [slice(int(c[0]), int(c[-1]) + 1) for c, *_ in segments if len(c)]
            groups.append(Group(number, spans[0], spans[1:]))
            for columns, tokens, segment, first_position in segments:
                ids[number, columns] = tokens
                positions[number, columns] = first_position + np.arange(len(columns))
                row_ids[number, columns] = row
                segment_ids[number, columns] = segment
    prompt_lengths = [len(prompt) for _ in indices for s in sequences for prompt, _ in s]
    sequence_indices = [sequence for response in indices for sequence in response]
    if with_prompts or trained is None:
        target_columns = [
            np.arange(1 if with_prompts else length, len(sequence))
            for length, sequence in zip(prompt_lengths, sequence_indices, strict=True)
        ]
    else:
        target_columns = [
            length + np.flatnonzero(marks)
            for length, marks in zip(prompt_lengths, trained, strict=True)
        ]
    targets = _target_indices(sequence_indices, target_columns)

    def to_device(array: np.ndarray) -> torch.Tensor:
        return copy_to_device(torch.from_numpy(array), device)

    inputs = ModelInputs(to_device(ids))
    if packing:
        inputs = inputs._replace(position_ids=to_device(positions))
        choices = acceleration.current()
        share = num_responses > 1 and device.type == "cpu" and are_long(groups)
        if share and not choices.compile:
            inputs = inputs._replace(
                segments=Segments(to_device(row_ids), to_device(segment_ids), None, 0, groups)
            )
        elif choices.attn_implementation == "sdpa":
            mask = packed_attention_mask(to_device(row_ids), to_device(segment_ids))
            inputs = inputs._replace(attention_mask=mask)
        else:
            boundaries = row_boundaries(row_ids)
            inputs = inputs._replace(
                segments=Segments(
                    to_device(row_ids),
                    to_device(segment_ids),
                    to_device(boundaries) if num_responses == 1 else None,
                    int(np.diff(boundaries).max()),
                )
            )
    else:
        # Without a mask, OPT sums one of floats, for which GPUs have no deterministic kernel.
        inputs = inputs._replace(attention_mask=torch.ones_like(inputs.input_ids))
    return TokenBatch(inputs, *map(to_device, targets))


def _one_response_each(sequences: list[list[Row]], num_responses: int) -> list[list[Row]]:
    """Return a sequence for each response, all first responses before all second ones."""
    separate: list[list[Row]] = [
        [(prompt, [response])] for [(prompt, responses)] in sequences for response in responses
    ]
    return [
        sequence for first in range(num_responses) for sequence in separate[first::num_responses]
    ]


def _target_indices(
    sequences: list[np.ndarray], columns: list[np.ndarray]
) -> tuple[np.ndarray, ...]:
    """Return state_index, target_index, last_index and target_lengths of a TokenBatch.

    Args:
        sequences: the flat indices of each sequence.
        columns: where the target tokens of each sequence are.
    """
    pairs = [*zip(sequences, columns, strict=True)]
    return (
        np.concatenate([sequence[targets - 1] for sequence, targets in pairs]),
        np.concatenate([sequence[targets] for sequence, targets in pairs]),
        np.array([sequence[-1] for sequence in sequences]),
        np.array([len(targets) for targets in columns]),
    )


def row_boundaries(row_ids: np.ndarray) -> np.ndarray:
    """Return int32 [N + 1]: where rows and padding begin and end in the flattened positions.

    Args:
        row_ids: [B, T], see packed_attention_mask. No row continues in the next sequence.
    """
    starts = np.diff(row_ids, axis=1, prepend=-1) != 0
    return np.append(np.flatnonzero(starts), row_ids.size).astype(np.int32)


def packed_attention_mask(row_ids: torch.Tensor, segment_ids: torch.Tensor) -> torch.Tensor:
    """Return the block-causal mask [B, 1, T, T]: True where a token attends to another.

    A token attends to earlier tokens of its row that belong to the prompt or to its own segment.

    Args:
        row_ids: [B, T], the number of a token's row in its packed sequence, 0 for padding.
        segment_ids: [B, T], 0 for a prompt, k for the k-th response.
    """
    width = row_ids.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=row_ids.device).tril()
    same_row = (row_ids[:, :, None] == row_ids[:, None, :]) & causal
    attended = segment_ids[:, None, :]
    # Padding attends to earlier padding: the softmax over no position at all is not defined.
    return (same_row & ((attended == 0) | (segment_ids[:, :, None] == attended)))[:, None]


def sliding_window_mask(
    mask: torch.Tensor, position_ids: torch.Tensor, window: int
) -> torch.Tensor:
    """Return a mask [B, 1, T, T] without the tokens that lie `window` or more positions back.

    Positions count, not columns: between the second response of a row and its prompt lies the first
    one.

    Args:
        mask: bool [B, 1, T, T]. position_ids: [B, T].
    """
    # Compared without their differences, which would take eight times the memory of the mask.
    in_window = position_ids[:, None, :] > position_ids[:, :, None] - window
    return mask & in_window[:, None]
