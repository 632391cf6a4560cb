"""How rows are shared among steps, ranks and passes, and how a pass is laid out."""

from itertools import chain

import numpy as np
import pytest
import torch

from snakechat.data.tokens import RaggedWriter
from snakechat.modeling.batches import (
    SEEN_TOKENS,
    Examples,
    bucket,
    fill,
    global_batches,
    largest_first,
    lay_out,
    num_steps,
    pack,
    share,
    visible,
)

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


# Examples.


@pytest.mark.parametrize("rows", [[2, 0], np.array([2, 0]), range(2, -1, -2)])
def test_some_examples_are_those_rows_in_that_order(rows):
    examples = Examples([[1], [2, 2], [3, 3, 3]], [[4], [5], [6, 6]], [[7, 7], [8], []])
    some = examples.some(rows)
    assert (some.prompts, some.responses) == ([[3, 3, 3], [1]], ([[6, 6], [4]], [[], [7, 7]]))
    assert some.prompt_lengths.tolist() == [3, 1]
    assert some.response_lengths.tolist() == [[2, 1], [0, 2]]
    assert len(examples) == 3


def test_some_examples_may_be_on_disk(tmp_path):
    for name, rows in (("prompt", [[1], [2, 2], [3]]), ("chosen", [[4, 4], [5], [6]])):
        with RaggedWriter(tmp_path, f"train.{name}", 300) as writer:
            writer.write(rows)
    some = Examples.read(tmp_path, "train", "chosen").some([1, 0])
    assert [ids.tolist() for ids in some.prompts] == [[2, 2], [1]]
    assert [ids.tolist() for ids in some.responses[0]] == [[5], [4, 4]]
    [part] = some.passes([0, 1], 100, True, CPU)
    ids = part.grid.inputs.input_ids.flatten()
    assert sorted(ids[part.grid.tokens].tolist()) == [4, 4, 5]


# Passes.


def numbered(sizes):
    """(row, size) of rows that are given longest first."""
    return list(enumerate(sizes))


def rows_like_real_ones(seed, number):
    """Lengths of a prompt and its responses: most are short, a few are long."""
    random = np.random.default_rng(seed)
    prompts, responses = random.lognormal(5.2, 0.7, number), random.lognormal(4.6, 0.8, number)
    return prompts.astype(int).clip(10, 384) + responses.astype(int).clip(3, 256)


def grid_size(lines, size_of):
    """Tokens of a pass, padding included."""
    return len(lines) * max(sum(size_of[row] for row in line) for line in lines)


def test_each_row_goes_into_the_first_line_that_has_room_for_it():
    # Two lines of 10: the 5, the 4 and the last 3 find no room.
    lines, left, _ = fill(numbered([10, 7, 5, 4, 3, 3]), 10, 20)
    assert (lines, left) == ([[0], [1, 4]], [(2, 5), (3, 4), (5, 3)])


def test_a_token_costs_more_beside_padding_and_in_wide_lines():
    # 16 of 20 places are filled, and a token looks at 10 places.
    assert fill(numbered([10, 6]), 10, 20)[2] == pytest.approx(20 * (SEEN_TOKENS + 10) / 16)
    assert fill(numbered([10, 6]), 16, 20)[2] == pytest.approx(SEEN_TOKENS + 16)


def test_one_pass_has_the_lines_that_it_needs():
    assert pack(numbered([6, 3, 3, 2]), 1000) == [[[0], [1, 2], [3]]]


def test_lines_are_wider_than_the_longest_row_where_that_leaves_less_padding():
    # Four lines of 10 places for 30 tokens, or two of 17.
    assert pack(numbered([10, 7, 7, 6]), 1000) == [[[0, 1], [2, 3]]]


def test_a_row_over_max_tokens_passes_alone():
    assert pack(numbered([500, 3, 3]), 100) == [[[0]], [[1], [2]]]
    assert bucket(numbered([500, 3, 3]), 100) == [[0], [1, 2]]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("packs", [True, False])
def test_passes_have_every_row_once_and_keep_to_max_tokens(packs, seed, monkeypatch):
    # More rows than are tried for a pass.
    monkeypatch.setattr("snakechat.modeling.batches.CANDIDATES", 16)
    random = np.random.default_rng(seed)
    rows = random.permutation(1000)[: random.integers(1, 60)]
    sizes = random.integers(1, 41, size=len(rows))
    size_of = dict(zip(rows.tolist(), sizes.tolist(), strict=True))
    passes = [lines for lines, counts in share(rows, sizes, 100, packs) if counts]
    assert sorted(row for lines in passes for line in lines for row in line) == sorted(size_of)
    for lines in passes:
        assert grid_size(lines, size_of) <= 100
        if not packs:
            assert {len(line) for line in lines} == {1}


# Measured: 0.110, 0.037 and 0.058; 0.188, 0.038 and 0.417 where each row has a line by itself.
@pytest.mark.parametrize(
    ("number", "max_tokens", "bar"), [(64, 8192, 0.13), (512, 8192, 0.05), (64, 32768, 0.08)]
)
def test_little_of_a_packed_pass_is_padding(number, max_tokens, bar):
    wasted = []
    for seed in range(8):
        sizes = rows_like_real_ones(seed, number)
        passes = share(range(number), sizes, max_tokens, packs=True)
        wasted.append(1 - sizes.sum() / sum(grid_size(lines, sizes) for lines, _ in passes))
    assert np.mean(wasted) < bar


def test_passes_are_full_where_sizes_are_equal():
    assert [len(rows) for rows in bucket(numbered([5] * 10), 20)] == [4, 4, 2]


def test_rows_of_like_size_share_a_bucket():
    # 2 x 10, 3 x 4 and not 4 x 4.
    assert bucket(numbered([10, 9, 4, 4, 3, 3]), 20) == [[0, 1], [2, 3, 4, 5]]
    assert bucket(numbered([10, 9, 6, 6, 6, 3]), 20) == [[0, 1], [2, 3, 4], [5]]


def test_the_largest_come_first_and_equal_ones_in_their_order():
    assert largest_first([7, 8, 9, 5], [3, 4, 3, 4]) == [(8, 4), (5, 4), (7, 3), (9, 3)]


# Ranks.


def test_ranks_take_turns_there_and_back():
    shares = [share(range(8), [8, 7, 6, 5, 4, 3, 2, 1], 8, False, r, 2) for r in range(2)]
    rows = [[row for lines, _ in part for [row] in lines] for part in shares]
    # Sizes 8, 5, 4, 1 and 7, 6, 3, 2: 18 each.
    assert rows == [[0, 3, 4, 7], [1, 2, 5, 6]]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("packs", [True, False])
def test_each_row_is_on_one_rank_and_all_have_as_many_passes(packs, world_size):
    sizes, idle = rows_like_real_ones(3, 100), 0
    for number in (1, 2, 5, 30, 100):
        # Here and there a row that fills a pass.
        longs = [*sizes[: number - 1], 2000]
        ranks = range(world_size)
        shares = [share(range(number), longs, 1000, packs, rank, world_size) for rank in ranks]
        assert len({len(part) for part in shares}) == 1
        counted = [lines for part in shares for lines, counts in part if counts]
        rows = sorted(row for lines in counted for line in lines for row in line)
        assert rows == list(range(number))
        shortest = int(np.argmin(longs))
        for lines, counts in chain(*shares):
            if not counts:
                assert [[longs[row] for row in line] for line in lines] == [[longs[shortest]]]
                idle += 1
    assert (idle > 0) == (world_size > 1)


@pytest.mark.parametrize("packs", [True, False])
def test_more_ranks_than_rows_are_idle(packs):
    shares = [share([4, 9], [6, 3], 100, packs, rank, 3) for rank in range(3)]
    assert shares == [[([[4]], True)], [([[9]], True)], [([[9]], False)]]


# Examples.


@pytest.fixture
def examples():
    """Three pairs: prompts of 2, 1 and 3 tokens."""
    prompts = [[11, 12], [21], [31, 32, 33]]
    return Examples(prompts, [[13, 14, 15], [22], [34]], [[16], [23, 24], [35, 36]])


def test_examples_are_read_from_disk(examples, tmp_path):
    for name, rows in zip(
        ("prompt", "chosen", "rejected"), (examples.prompts, *examples.responses), strict=True
    ):
        with RaggedWriter(tmp_path, f"eval.{name}", 300) as writer:
            writer.write(rows)
    found = Examples.read(tmp_path, "eval", "chosen", "rejected")
    assert len(found) == len(examples) == 3
    assert found.prompt_lengths.tolist() == examples.prompt_lengths.tolist() == [2, 1, 3]
    lengths = [[3, 1, 1], [1, 2, 2]]
    assert found.response_lengths.tolist() == examples.response_lengths.tolist() == lengths
    for packs in (True, False):
        [ours], [theirs] = (e.passes(np.arange(3), 99, packs, CPU) for e in (examples, found))
        assert torch.equal(ours.grid.inputs.input_ids, theirs.grid.inputs.input_ids)


def test_the_first_examples_are_examples(examples):
    first = examples.first(2)
    assert len(first) == 2
    assert first.prompts == [[11, 12], [21]]
    assert list(first.responses) == [[[13, 14, 15], [22]], [[16], [23, 24]]]
    assert len(examples.first(9)) == 3


def test_the_first_token_of_a_prompt_is_never_learnt(examples):
    assert examples.num_tokens(with_prompts=False).tolist() == [4, 3, 3]
    responses = Examples(examples.prompts, examples.responses[0])
    assert responses.num_tokens(with_prompts=False).tolist() == [3, 1, 1]
    assert responses.num_tokens(with_prompts=True).tolist() == [4, 1, 3]


@pytest.mark.parametrize("with_prompts", [False, True])
@pytest.mark.parametrize("packs", [True, False])
def test_passes_learn_as_many_tokens_as_are_counted(packs, with_prompts, examples):
    examples = Examples(examples.prompts, examples.responses[0])
    for part in examples.passes(np.arange(3), 6, packs, CPU, with_prompts):
        assert part.grid.inputs.input_ids.numel() <= 6
        expected = examples.num_tokens(with_prompts)[part.rows]
        assert part.grid.lengths.tolist() == expected.tolist()


@pytest.mark.parametrize("packs", [True, False])
def test_passes_of_pairs_keep_to_max_tokens_with_all_that_stands_in_them(packs):
    random = np.random.default_rng(1)
    ids = [[[9] * length for length in random.integers(1, 9, 50)] for _ in range(3)]
    parts = list(Examples(*ids).passes(np.arange(50), 54, packs, CPU))
    assert sorted(row for part in parts for row in part.rows) == list(range(50))
    sizes = [part.grid.inputs.input_ids.numel() for part in parts]
    assert max(sizes) <= 54
    # The longest pair has 24 tokens, or 2 x 16: there is room for one more beside most.
    assert np.mean(sizes[:-1]) > 35


def test_rows_of_a_pass_are_told_in_the_order_of_its_sequences(examples):
    # All three rows, in an order of their own; the grid has 5 and 6 tokens a row.
    for packs in (True, False):
        [part] = examples.passes(np.array([2, 0, 1]), 99, packs, CPU)
        ids = part.grid.inputs.input_ids.flatten()
        ends = ids[part.grid.ends].view(2, -1).tolist()
        lasts = [[responses[row][-1] for row in part.rows] for responses in examples.responses]
        assert ends == lasts
        assert sorted(part.rows) == [0, 1, 2]


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_has_its_passes_and_knows_the_last(world_size, packs, examples, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    counted, numbers = [], set()
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        # Two rows in a pass at most.
        parts = list(examples.passes(np.arange(3), 12, packs, CPU))
        assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
        counted += [row for part in parts if part.counts for row in part.rows]
        numbers.add(len(parts))
    assert sorted(counted) == [0, 1, 2]
    assert len(numbers) == 1


# Layout.

PAIRS = {
    "A": ([11, 12], [[13, 14, 15], [16]]),
    "B": ([21], [[22], [23, 24]]),
    "C": ([31, 32, 33], [[34], [35, 36]]),
}


def grid_of(packs, *lines, with_prompts=False):
    """The grid of lines of rows, and the ids at its places."""
    grid = lay_out([[PAIRS[name] for name in line] for line in lines], packs, CPU, with_prompts)
    return grid, grid.inputs.input_ids.flatten()


def test_a_packed_line_has_each_prompt_once_and_its_responses_behind_it():
    grid, _ = grid_of(True, "AB", "C")
    assert grid.inputs.input_ids.tolist() == [
        [11, 12, 13, 14, 15, 16, 21, 22, 23, 24],
        [31, 32, 33, 34, 35, 36, 0, 0, 0, 0],
    ]
    # Each response goes on from the prompt's end.
    assert grid.inputs.position_ids.tolist() == [
        [0, 1, 2, 3, 4, 2, 0, 1, 1, 2],
        [0, 1, 2, 3, 3, 4, 0, 0, 0, 0],
    ]
    assert grid.inputs.mask.shape == (2, 1, 10, 10)
    assert grid.before.tolist() == [1, 2, 3, 6, 12, 1, 6, 8, 12, 14]
    assert grid.tokens.tolist() == [2, 3, 4, 7, 13, 5, 8, 9, 14, 15]
    assert grid.ends.tolist() == [4, 7, 13, 5, 9, 15]


def test_without_packing_each_response_is_a_line_behind_a_prompt_of_its_own():
    grid, _ = grid_of(False, "A", "B", "C")
    assert grid.inputs.input_ids.tolist() == [
        [11, 12, 13, 14, 15],
        [21, 22, 0, 0, 0],
        [31, 32, 33, 34, 0],
        [11, 12, 16, 0, 0],
        [21, 23, 24, 0, 0],
        [31, 32, 33, 35, 36],
    ]
    assert grid.inputs.position_ids is None
    assert grid.inputs.mask is None
    assert grid.before.tolist() == [1, 2, 3, 5, 12, 16, 20, 21, 27, 28]
    assert grid.tokens.tolist() == [2, 3, 4, 6, 13, 17, 21, 22, 28, 29]
    assert grid.ends.tolist() == [4, 6, 13, 17, 22, 29]


@pytest.mark.parametrize(("packs", "lines"), [(True, ["AB", "C"]), (False, ["A", "B", "C"])])
def test_all_first_responses_stand_before_all_second_ones(packs, lines):
    grid, ids = grid_of(packs, *lines)
    assert ids[grid.tokens].tolist() == [13, 14, 15, 22, 34, 16, 23, 24, 35, 36]
    assert ids[grid.before].tolist() == [12, 13, 14, 21, 33, 12, 21, 23, 33, 35]
    assert ids[grid.ends].tolist() == [15, 22, 34, 16, 24, 36]
    assert grid.lengths.tolist() == [3, 1, 1, 1, 2, 2]


@pytest.mark.parametrize(("packs", "lines"), [(True, ["AB", "C"]), (False, ["A", "B", "C"])])
def test_with_prompts_all_but_the_first_token_is_learnt(packs, lines):
    grid, ids = grid_of(packs, *lines, with_prompts=True)
    first = [12, 13, 14, 15, 22, 32, 33, 34]
    assert ids[grid.tokens].tolist() == [*first, 12, 16, 23, 24, 32, 33, 35, 36]
    first = [11, 12, 13, 14, 21, 31, 32, 33]
    assert ids[grid.before].tolist() == [*first, 11, 12, 21, 23, 31, 32, 33, 35]
    assert ids[grid.ends].tolist() == [15, 22, 34, 16, 24, 36]
    assert grid.lengths.tolist() == [4, 1, 3, 2, 2, 4]


@pytest.mark.parametrize("packs", [True, False])
def test_a_response_may_have_one_token_or_none(packs):
    rows = [([11, 12], [[]]), ([21], [[22]]), ([31], [[]])]
    lines = [rows] if packs else [[row] for row in rows]
    for with_prompts, learnt, lengths in ((False, [22], [0, 1, 0]), (True, [12, 22], [1, 1, 0])):
        grid = lay_out(lines, packs, CPU, with_prompts)
        ids = grid.inputs.input_ids.flatten()
        assert ids[grid.tokens].tolist() == learnt
        assert ids[grid.ends].tolist() == [12, 22, 31]
        assert grid.lengths.tolist() == lengths


@pytest.mark.parametrize("kind", [list, lambda ids: np.array(ids, dtype=np.uint16)])
def test_ids_are_taken_as_they_are_on_disk(kind):
    grid = lay_out([[(kind([65535, 0]), [kind([7])])]], True, CPU)
    assert grid.inputs.input_ids.tolist() == [[65535, 0, 7]]
    assert grid.inputs.input_ids.dtype == torch.int64


# Who sees whom.


def test_no_response_sees_the_other_and_no_row_another():
    # A prompt of two tokens with responses of two and one; one of one with responses of one; padding.
    rows = torch.tensor([[1, 1, 1, 1, 1, 2, 2, 2, 0, 0]])
    branches = torch.tensor([[0, 0, 1, 1, 2, 0, 1, 2, 0, 0]])
    picture = [
        "x . . . . . . . . .",
        "x x . . . . . . . .",
        "x x x . . . . . . .",
        "x x x x . . . . . .",
        "x x . . x . . . . .",
        ". . . . . x . . . .",
        ". . . . . x x . . .",
        ". . . . . x . x . .",
        ". . . . . . . . x .",
        ". . . . . . . . x x",
    ]
    expected = [[mark == "x" for mark in line.split()] for line in picture]
    found = visible(rows, branches)
    assert found.dtype == torch.bool
    assert found.tolist() == [[expected]]


def test_each_token_sees_itself_and_padding_sees_no_other():
    grid, ids = grid_of(True, "AB", "C", "BB")
    for line, mask in zip(grid.inputs.input_ids, grid.inputs.mask[:, 0], strict=True):
        assert mask.diagonal().all()
        assert not mask.triu(1).any()
        padding = line == 0
        assert not mask[padding][:, ~padding].any()
        assert not mask[~padding][:, padding].any()
    assert (ids == 0).any()
