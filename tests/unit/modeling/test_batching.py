"""Batches: rows of each step and rank, packed sequences, their tensors and attention masks."""

from itertools import chain

import numpy as np
import pytest
import torch

from snakechat.modeling.batching import Examples, distribute_rows, epoch_batches
from snakechat.modeling.models import Acceleration, accelerated
from snakechat.workflow.errors import InputError

CPU = torch.device("cpu")


def test_only_trained_tokens_of_a_response_are_targets():
    examples = Examples([[1], [2, 2]], [[4, 5, 6], [7, 8]], trained=[[1, 0, 1], [0, 1]])
    assert examples.num_tokens(with_prompts=False).tolist() == [2, 1]
    assert examples.num_tokens(with_prompts=True).tolist() == [3, 3]
    assert examples.select([1]).num_tokens(with_prompts=False).tolist() == [1]


@pytest.mark.parametrize(
    ("prompts", "others"),
    [
        # Weights repeat rows, and a prompt has several responses.
        ([[1], [1], [2], [2], [2], [3]], [2, 2, 5, 5, 5, 0]),
        # Of the same length, one the start of the other.
        ([[1, 2], [1, 3], [1, 3, 3]], [1, 2, 0]),
    ],
)
def test_mismatched_responses_are_those_to_another_prompt(prompts, others):
    responses = [[10 + row] for row in range(len(prompts))]
    [mismatched] = Examples(prompts, responses).mismatched(9, "train").responses
    assert mismatched == [responses[other] for other in others]


def test_prompts_that_are_all_the_same_have_no_mismatched_responses():
    examples = Examples([[1, 2]] * 3, [[3]] * 3)
    with pytest.raises(InputError, match=r"^the eval split: all 3 prompts are the same, "):
        examples.mismatched(9, "eval")


@pytest.mark.parametrize("packing", [True, False])
def test_micro_batches_of_pairs_respect_the_token_limit_with_padding(packing, monkeypatch):
    # More rows than are considered for one micro-batch.
    monkeypatch.setattr("snakechat.modeling.batching.MAX_CANDIDATES", 16)
    random = np.random.default_rng(1)
    ids = [[[9] * length for length in random.integers(1, 9, 50)] for _ in range(3)]
    with accelerated(Acceleration(micro_batch_tokens=54)):
        micro_batches = list(Examples(*ids).micro_batches(np.arange(50), packing, CPU))
    rows = [row for micro_batch in micro_batches for row in micro_batch.rows]
    assert sorted(rows) == list(range(50))
    sizes = [micro_batch.batch.input_ids.numel() for micro_batch in micro_batches]
    assert max(sizes) <= 54
    # The longest pair has 24 tokens, or 2 x 16: most of them leave space for another one.
    assert np.mean(sizes[:-1]) > 35


def test_ranks_take_turns_forwards_and_backwards():
    by_rank = [distribute_rows(range(8), [8, 7, 6, 5, 4, 3, 2, 1], 8, False, r, 2) for r in (0, 1)]
    rows = [[row for packed, _ in each for [row] in packed] for each in by_rank]
    # Sizes 8, 5, 4, 1 and 7, 6, 3, 2: 18 each.
    assert rows == [[0, 3, 4, 7], [1, 2, 5, 6]]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("packing", [True, False])
def test_each_row_is_on_one_rank_and_dummies_repeat_the_shortest(packing, world_size):
    # Most are short, a few are long.
    sizes = np.random.default_rng(3).lognormal(5.6, 0.7, 100).astype(int).clip(13, 640)
    num_dummies = 0
    for number in (1, 2, 5, 30, 100):
        # The last row fills a micro-batch by itself.
        lengths = [*sizes[: number - 1], 2000]
        by_rank = [
            distribute_rows(range(number), lengths, 1000, packing, rank, world_size)
            for rank in range(world_size)
        ]
        assert len({len(each) for each in by_rank}) == 1
        counted_batches = [packed for each in by_rank for packed, counted in each if counted]
        rows = sorted(row for packed in counted_batches for sequence in packed for row in sequence)
        assert rows == list(range(number))
        shortest = int(np.argmin(lengths))
        for packed, counted in chain(*by_rank):
            if not counted:
                sizes_in_batch = [[lengths[row] for row in sequence] for sequence in packed]
                assert sizes_in_batch == [[lengths[shortest]]]
                num_dummies += 1
    assert (num_dummies > 0) == (world_size > 1)


def test_each_epoch_contains_every_row_once():
    def steps(epochs, max_steps=None):
        batches = epoch_batches(10, 4, epochs, 1, max_steps)
        return [[rows.tolist() for rows in epoch] for epoch in batches]

    first, second, third = steps(3)
    for epoch in (first, second, third):
        assert [len(rows) for rows in epoch] == [4, 4, 2]
        assert sorted(chain(*epoch)) == list(range(10))
    # In another order, whatever the number of epochs is.
    assert first != second and steps(1) == [first]
    # The whole epochs of a training of four steps.
    assert steps(3, max_steps=4) == [first, second]


def test_a_packed_sequence_has_each_prompt_once_before_its_responses():
    prompts, chosen = [[11, 12], [21], [31, 32, 33]], [[13, 14, 15], [22], [34]]
    rows = Examples(prompts, chosen, [[16], [23, 24], [35, 36]])
    batch = rows.collate([[0, 1], [2]], True, CPU)
    assert batch.input_ids.tolist() == [
        [11, 12, 13, 14, 15, 16, 21, 22, 23, 24],
        [31, 32, 33, 34, 35, 36, 0, 0, 0, 0],
    ]
    # The positions of each response continue from the end of the prompt.
    assert batch.position_ids.tolist() == [
        [0, 1, 2, 3, 4, 2, 0, 1, 1, 2],
        [0, 1, 2, 3, 3, 4, 0, 0, 0, 0],
    ]
    assert batch.state_index.tolist() == [1, 2, 3, 6, 12, 1, 6, 8, 12, 14]
    assert batch.target_index.tolist() == [2, 3, 4, 7, 13, 5, 8, 9, 14, 15]
    assert batch.last_index.tolist() == [4, 7, 13, 5, 9, 15]


@pytest.mark.parametrize("packing", [True, False])
def test_a_response_may_have_one_token_or_none(packing):
    rows = Examples([[11, 12], [21], [31]], [[], [22], []])
    packed = [[0, 1, 2]] if packing else [[0], [1], [2]]
    for with_prompts, targets, lengths in ((False, [22], [0, 1, 0]), (True, [12, 22], [1, 1, 0])):
        batch = rows.collate(packed, packing, CPU, with_prompts)
        ids = batch.input_ids.flatten()
        assert ids[batch.target_index].tolist() == targets
        assert ids[batch.last_index].tolist() == [12, 22, 31]
        assert batch.target_lengths.tolist() == lengths
