"""Batches: which rows make an optimizer step, how they share its passes, how a pass is laid out.

A row is a prompt and its responses (one for SFT, two for a pair, any number for rollouts). It is laid
out as prompt | response | response ...: the prompt goes through the model once, no response sees another,
and positions of each go on from the prompt's end. Several rows, which do not see each other, stand
in one line of the grid [B, T] that a model is given.

That takes a model that accepts a mask of its own (models.takes_masks). For others each response is a
line by itself, behind a copy of its prompt, padded on the right, where a causal model sees no
padding.
"""

from typing import NamedTuple

import numpy as np
import torch

from snakechat.data.tokens import Ragged
from snakechat.workflow import distributed as ranks

# Rows that are tried for a pass: enough to fill its lines, and few enough to go through.
CANDIDATES = 1024
# Widths of lines that are tried, in lengths of the longest row.
LINE_WIDTHS = (1, 1.25, 1.5, 2)
# A token costs as much as it costs to look at so many others: 6 times the width of a small model.
SEEN_TOKENS = 4096


def num_steps(num_rows, batch_size, epochs):
    """Optimizer steps of a run: the last batch of an epoch may be smaller, none is left out."""
    return epochs * -(-num_rows // batch_size)


def global_batches(num_rows, batch_size, epochs, seed):
    """Row numbers of each optimizer step, in a new order each epoch."""
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(num_rows)
        for start in range(0, num_rows, batch_size):
            yield order[start : start + batch_size]


class Examples:
    """Rows to train or to be judged on: a prompt, and the same number of responses, each.

    prompts, *responses: sequences of ids by row (a Ragged, or lists).
    """

    def __init__(self, prompts, *responses):
        self.prompts, self.responses = prompts, responses
        self.prompt_lengths = lengths_of(prompts)
        self.response_lengths = np.stack([lengths_of(ids) for ids in responses])

    @classmethod
    def read(cls, folder, part, *responses):
        """Those of a part (train or eval) of a folder of tokens. responses: chosen, rejected."""
        return cls(*(Ragged(folder, f"{part}.{name}") for name in ("prompt", *responses)))

    def __len__(self):
        return len(self.prompts)

    def first(self, number):
        """The first of them."""
        return self.some(range(min(number, len(self))))

    def some(self, rows):
        """Some of them."""
        prompts, *responses = (
            [ids[row] for row in rows] for ids in (self.prompts, *self.responses)
        )
        return Examples(prompts, *responses)

    def num_tokens(self, with_prompts):
        """How many tokens [n] of each row are learnt: see lay_out."""
        prompts = self.prompt_lengths - 1 if with_prompts else 0
        return self.response_lengths.sum(axis=0) + prompts

    def passes(self, rows, max_tokens, packs, device, with_prompts=False):
        """The passes of this rank over some rows: each a Pass. See share and lay_out."""
        prompts, responses = self.prompt_lengths[rows], self.response_lengths[:, rows]
        if packs:
            sizes = prompts + responses.sum(axis=0)
        else:
            sizes = len(responses) * (prompts + responses.max(axis=0))
        shared = share(rows, sizes, max_tokens, packs, ranks.rank(), ranks.world_size())
        for number, (lines, counts) in enumerate(shared, start=1):
            units = [
                [
                    (self.prompts[row], [response[row] for response in self.responses])
                    for row in line
                ]
                for line in lines
            ]
            grid = lay_out(units, packs, device, with_prompts)
            found = [row for line in lines for row in line]
            yield Pass(found, grid, counts, number == len(shared))


def lengths_of(sequences):
    """Length [n] of each sequence."""
    found = getattr(sequences, "lengths", None)
    return np.array([len(ids) for ids in sequences]) if found is None else found


class Pass(NamedTuple):
    """rows: in the order of the grid's sequences. counts: false of one that a rank runs only
    because others do. last: whether it is a step's last.
    """

    rows: list
    grid: "Grid"
    counts: bool
    last: bool


def share(rows, sizes, max_tokens, packs, rank=0, world_size=1):
    """Share the rows of a step among ranks, and those of a rank among passes.

    sizes: tokens of each of the rows. max_tokens: of a pass, padding included; a row of more passes
    alone. packs: whether a line holds several rows, or each row has lines of its own.

    Returns (lines of rows, whether it counts) of each pass. Every rank has as many, as they speak
    to each other in each: one that has fewer goes over the shortest row, which does not count.
    """
    sized = largest_first(rows, sizes)
    # There and back again, so that nobody has the longest of each turn.
    turns = [*range(world_size), *reversed(range(world_size))]
    hands = [
        [item for place, item in enumerate(sized) if turns[place % len(turns)] == number]
        for number in range(world_size)
    ]
    if packs:
        shared = [pack(hand, max_tokens) for hand in hands]
    else:
        shared = [[[[row] for row in rows] for rows in bucket(hand, max_tokens)] for hand in hands]
    missing = max(map(len, shared)) - len(shared[rank])
    return [(lines, True) for lines in shared[rank]] + [([[sized[-1][0]]], False)] * missing


def largest_first(rows, sizes):
    """(row, size) of each row, the largest first."""
    order = np.argsort(-np.asarray(sizes), kind="stable")
    return [(int(rows[index]), int(sizes[index])) for index in order]


def pack(sized, max_tokens):
    """Lines of rows for each pass. sized: (row, length), longest first.

    The lines of a pass are as long as its longest row, or somewhat longer: whatever costs the least
    for each token that is no padding.
    """
    found = []
    while sized:
        longest = sized[0][1]
        widths = {min(int(share * longest), max(max_tokens, longest)) for share in LINE_WIDTHS}
        tries = [fill(sized[:CANDIDATES], width, max_tokens) for width in sorted(widths)]
        lines, left, _ = min(tries, key=lambda tried: tried[2])
        found.append(lines)
        sized = left + sized[CANDIDATES:]
    return found


def fill(sized, width, max_tokens):
    """Lines of one pass, what is left, and what a token costs that is no padding.

    Each row goes into the first line that has room for it (first-fit decreasing: Johnson 1973).
    """
    rooms = np.full(max(1, max_tokens // width), width)
    lines, left = [[] for _ in rooms], []
    for row, length in sized:
        line = int(np.argmax(rooms >= length))
        if rooms[line] < length:
            left.append((row, length))
            continue
        rooms[line] -= length
        lines[line].append(row)
    rooms = rooms[[bool(line) for line in lines]]
    filled = width - rooms
    cost = filled.max() * len(filled) * (SEEN_TOKENS + filled.max()) / filled.sum()
    return [line for line in lines if line], left, cost


def bucket(sized, max_tokens):
    """Rows of each pass, like sizes together. sized: (row, size), largest first."""
    found, largest = [], 0
    for row, size in sized:
        # All are padded to the first.
        if not found or (len(found[-1]) + 1) * largest > max_tokens:
            found.append([])
            largest = size
        found[-1].append(row)
    return found


class Inputs(NamedTuple):
    """What a model is given: input_ids [B, T], and for packed lines position_ids [B, T] and mask
    [B, 1, T, T] (bool, true where a token sees another).
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor | None = None
    mask: torch.Tensor | None = None


class Grid(NamedTuple):
    """A pass, laid out. S sequences (all first responses, then all second ones), N of their tokens.

    tokens, before: flat places in the grid [N] of each token and of the state that foretells it,
    one sequence after the other. ends: flat place [S] of each sequence's last token. lengths:
    number [S] of each sequence's tokens among the N.
    """

    inputs: Inputs
    before: torch.Tensor
    tokens: torch.Tensor
    ends: torch.Tensor
    lengths: torch.Tensor


def lay_out(lines, packs, device, with_prompts=False):
    """Lay out lines of rows, each row (prompt, [response, ...]) of ids. Returns a Grid.

    The tokens of a sequence are those of its response; with_prompts, those of its prompt too, but for
    the first, which nothing foretells.
    """
    num_responses = len(lines[0][0][1])
    if not packs:
        lines = [
            [(prompt, [response])] for [(prompt, responses)] in lines for response in responses
        ]
        # All first responses, then all second ones.
        lines = [line for first in range(num_responses) for line in lines[first::num_responses]]
    sizes = [sum(len(p) + sum(map(len, responses)) for p, responses in line) for line in lines]
    shape = len(lines), max(sizes)
    ids, positions, rows, branches = (np.zeros(shape, np.int64) for _ in range(4))
    places = [[] for _ in range(num_responses if packs else 1)]
    for number, line in enumerate(lines):
        start = 0
        for row, (prompt, responses) in enumerate(line, start=1):
            stem = np.arange(start, start + len(prompt))
            parts = [(stem, prompt, 0, 0)]
            start += len(prompt)
            for branch, response in enumerate(responses, start=1):
                part = np.arange(start, start + len(response))
                parts.append((part, response, branch, len(prompt)))
                places[branch - 1].append(number * shape[1] + np.concatenate([stem, part]))
                start += len(response)
            for part, values, branch, first in parts:
                ids[number, part] = values
                positions[number, part] = first + np.arange(len(part))
                rows[number, part] = row
                branches[number, part] = branch
    sequences = [sequence for response in places for sequence in response]
    stems = [len(p) for _ in places for line in lines for p, _ in line]
    firsts = [1 if with_prompts else stem for stem in stems]
    cut = [(sequence, first) for sequence, first in zip(sequences, firsts, strict=True)]
    found = (
        np.concatenate([sequence[first - 1 : -1] for sequence, first in cut]),
        np.concatenate([sequence[first:] for sequence, first in cut]),
        np.array([sequence[-1] for sequence in sequences]),
        np.array([len(sequence) - first for sequence, first in cut]),
    )
    ids, positions, rows, branches, *found = (
        torch.from_numpy(values).to(device) for values in (ids, positions, rows, branches, *found)
    )
    inputs = Inputs(ids, positions, visible(rows, branches)) if packs else Inputs(ids)
    return Grid(inputs, *found)


def visible(rows, branches):
    """Mask [B, 1, T, T]: whom each token sees.

    rows: [B, T], which row of its line a token belongs to, 0 for padding; branches: [B, T], 0 for a
    prompt, else the number of the response.
    """
    width = rows.shape[1]
    asked = torch.ones(width, width, dtype=torch.bool, device=rows.device).tril()
    same = (rows[:, :, None] == rows[:, None, :]) & asked
    seen = branches[:, None, :]
    # Padding sees the padding before it: a token that sees nothing has no softmax.
    return (same & ((seen == 0) | (branches[:, :, None] == seen)))[:, None]
