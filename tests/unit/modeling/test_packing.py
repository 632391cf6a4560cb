"""Packing: which rows share a sequence, the tensors of a micro-batch, the attention mask."""

import pytest
import torch

from snakechat.modeling.attention import packed_attention_mask, sliding_window_mask
from snakechat.modeling.packing import collate, first_fit, pack_rows

CPU = torch.device("cpu")


# Bin packing.


def numbered(sizes):
    """(row, size) of rows that are given longest first."""
    return list(enumerate(sizes))


def test_each_row_goes_into_the_first_sequence_with_space_for_it():
    # Two sequences of 10: there is no space for the 5, the 4 and the last 3.
    packed, remaining, _ = first_fit(numbered([10, 7, 5, 4, 3, 3]), 10, 20)
    assert (packed, remaining) == ([[0], [1, 4]], [(2, 5), (3, 4), (5, 3)])


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        # Rows within the limit.
        ([6, 3, 3, 2], 1000, [[[0], [1, 2], [3]]]),
        # Wider than the longest row, to save padding: 4 sequences of 10 positions, or 2 of 17.
        ([10, 7, 7, 6], 1000, [[[0, 1], [2, 3]]]),
        # A row over the limit.
        ([500, 3, 3], 100, [[[0]], [[1], [2]]]),
    ],
)
def test_rows_are_packed_into_micro_batches(sizes, limit, expected):
    assert pack_rows(numbered(sizes), limit) == expected


# Tensors.

PAIRS = {
    "A": ([11, 12], [[13, 14, 15], [16]]),
    "B": ([21], [[22], [23, 24]]),
    "C": ([31, 32, 33], [[34], [35, 36]]),
}


def collate_pairs(packing, *sequences, with_prompts=False):
    """The batch of sequences of PAIRS, and its flattened ids."""
    rows = [[PAIRS[name] for name in names] for names in sequences]
    batch = collate(rows, packing, CPU, with_prompts)
    return batch, batch.inputs.input_ids.flatten()


def test_a_packed_sequence_has_each_prompt_once_before_its_responses():
    batch, _ = collate_pairs(True, "AB", "C")
    assert batch.inputs.input_ids.tolist() == [
        [11, 12, 13, 14, 15, 16, 21, 22, 23, 24],
        [31, 32, 33, 34, 35, 36, 0, 0, 0, 0],
    ]
    # The positions of each response continue from the end of the prompt.
    assert batch.inputs.position_ids.tolist() == [
        [0, 1, 2, 3, 4, 2, 0, 1, 1, 2],
        [0, 1, 2, 3, 3, 4, 0, 0, 0, 0],
    ]
    assert batch.state_index.tolist() == [1, 2, 3, 6, 12, 1, 6, 8, 12, 14]
    assert batch.target_index.tolist() == [2, 3, 4, 7, 13, 5, 8, 9, 14, 15]
    assert batch.last_index.tolist() == [4, 7, 13, 5, 9, 15]


@pytest.mark.parametrize("packing", [True, False])
def test_a_response_may_have_one_token_or_none(packing):
    rows = [([11, 12], [[]]), ([21], [[22]]), ([31], [[]])]
    sequences = [rows] if packing else [[row] for row in rows]
    for with_prompts, targets, lengths in ((False, [22], [0, 1, 0]), (True, [12, 22], [1, 1, 0])):
        batch = collate(sequences, packing, CPU, with_prompts)
        ids = batch.inputs.input_ids.flatten()
        assert ids[batch.target_index].tolist() == targets
        assert ids[batch.last_index].tolist() == [12, 22, 31]
        assert batch.target_lengths.tolist() == lengths


# Attention mask.


def mask_of(inputs):
    return packed_attention_mask(inputs.segments.row_ids, inputs.segments.segment_ids)


def test_a_sliding_window_counts_positions_and_not_columns():
    # A prompt of three tokens with responses of two; a prompt of one with two responses of one.
    rows = [([11, 12, 13], [[14, 15], [16, 17]]), ([21], [[22], [23]])]
    inputs = collate([rows], True, CPU).inputs
    picture = [
        "x . . . . . . . . .",
        "x x . . . . . . . .",
        ". x x . . . . . . .",
        ". . x x . . . . . .",
        ". . . x x . . . . .",
        # Next to the prompt, after another response.
        ". . x . . x . . . .",
        ". . . . . x x . . .",
        ". . . . . . . x . .",
        ". . . . . . . x x .",
        ". . . . . . . x . x",
    ]
    expected = [[mark == "x" for mark in line.split()] for line in picture]
    mask = sliding_window_mask(mask_of(inputs), inputs.position_ids, window=2)
    assert mask.tolist() == [[expected]]


def test_padding_has_a_position_to_attend_to_in_any_window():
    inputs = collate([[PAIRS["A"]], [PAIRS["B"]]], True, CPU).inputs
    mask = sliding_window_mask(mask_of(inputs), inputs.position_ids, window=1)
    assert mask.any(dim=-1).all()
