"""How rows are shared among optimizer steps and passes, and how passes are padded."""

from itertools import chain

import numpy as np
import pytest
import torch

from rlhf.batches import global_batches, micro_batches, num_steps, pad, span_mask

CPU = torch.device("cpu")


def batches(*arguments):
    return [rows.tolist() for rows in global_batches(*arguments)]


def test_each_epoch_has_every_row_once():
    found = batches(10, 4, 3, 1)
    assert [len(rows) for rows in found] == [4, 4, 2] * 3
    for epoch in range(3):
        rows = chain(*found[3 * epoch : 3 * epoch + 3])
        assert sorted(rows) == list(range(10))


@pytest.mark.parametrize(
    ("rows", "size", "epochs", "steps"),
    [(8, 4, 1, 2), (9, 4, 1, 3), (10, 4, 3, 9), (1, 4, 2, 2), (4, 1, 1, 4)],
)
def test_num_steps_is_the_number_of_batches(rows, size, epochs, steps):
    assert num_steps(rows, size, epochs) == steps
    assert len(batches(rows, size, epochs, 0)) == steps


def test_same_seed_same_order():
    assert batches(50, 8, 2, 7) == batches(50, 8, 2, 7)
    assert batches(50, 8, 2, 7) != batches(50, 8, 2, 8)


def test_epochs_differ_in_order():
    first, second = batches(50, 50, 2, 7)
    assert first != second
    assert first != list(range(50))


def test_more_epochs_begin_like_fewer():
    assert batches(20, 6, 3, 7)[:4] == batches(20, 6, 1, 7)


@pytest.mark.parametrize("seed", range(20))
def test_passes_cover_all_rows_and_keep_to_max_tokens(seed):
    random = np.random.default_rng(seed)
    rows = random.permutation(1000)[: random.integers(1, 60)]
    lengths = random.integers(1, 41, size=len(rows))
    length_of = dict(zip(rows.tolist(), lengths.tolist(), strict=True))
    passes = [[int(row) for row in group] for group in micro_batches(rows, lengths, 100)]
    assert sorted(chain(*passes)) == sorted(length_of)
    for group in passes:
        assert len(group) * max(length_of[row] for row in group) <= 100


def test_passes_are_full_where_lengths_are_equal():
    assert [len(group) for group in micro_batches(range(10), [5] * 10, 20)] == [4, 4, 2]


def test_rows_of_like_length_share_a_pass():
    passes = micro_batches(range(4), [10, 1, 10, 1], 20)
    assert sorted(sorted(group) for group in passes) == [[0, 2], [1, 3]]


def test_a_row_over_max_tokens_passes_alone():
    passes = list(micro_batches([7, 8, 9], [3, 500, 3], 100))
    assert [8] in passes
    assert sorted(chain(*passes)) == [7, 8, 9]


def test_no_rows_make_no_passes():
    assert list(micro_batches([], [], 100)) == []


def test_passes_are_the_same_each_time():
    lengths = [3, 9, 3, 3, 9, 1]
    assert list(micro_batches(range(6), lengths, 18)) == list(micro_batches(range(6), lengths, 18))


def test_pad_right():
    input_ids, attention_mask = pad([[5, 6, 7], [8]], 1, CPU)
    assert input_ids.tolist() == [[5, 6, 7], [8, 1, 1]]
    assert attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert input_ids.dtype == attention_mask.dtype == torch.int64


def test_pad_left():
    input_ids, attention_mask = pad([[8], [5, 6, 7]], 1, CPU, side="left")
    assert input_ids.tolist() == [[1, 1, 8], [5, 6, 7]]
    assert attention_mask.tolist() == [[0, 0, 1], [1, 1, 1]]


def test_the_mask_counts_a_pad_id_that_belongs_to_the_row():
    input_ids, attention_mask = pad([[1, 1], [5, 1, 1]], 1, CPU)
    assert input_ids.tolist() == [[1, 1, 1], [5, 1, 1]]
    assert attention_mask.tolist() == [[1, 1, 0], [1, 1, 1]]


def test_pad_takes_ids_as_they_are_on_disk():
    rows = [np.array([65535], dtype=np.uint16), np.array([3, 4], dtype=np.uint16)]
    assert pad(rows, 0, CPU)[0].tolist() == [[65535, 0], [3, 4]]


@pytest.mark.parametrize("kind", [list, np.array])
def test_span_mask_is_true_from_start_to_before_end(kind):
    mask = span_mask(kind([1, 0, 2]), kind([3, 4, 2]), 4, CPU)
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == [[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
