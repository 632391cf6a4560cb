"""Batches: the rows of each optimizer step, and how ranks and micro-batches divide and pack them.

A row is a prompt and its responses: one response for SFT, two for a preference pair, any number for
rollouts. It is laid out as prompt | response | response ...: the model processes the prompt once,
responses of a row do not attend to one another, and the positions of each response continue from
the end of the prompt. Several rows, which do not attend to one another, fill a packed sequence [T].

Packing requires a model that accepts a boolean mask (models.supports_packing). For other models,
each response takes a sequence by itself, after a copy of its prompt and padded on the right, where
causal attention ignores the padding.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from snakechat.config.settings import TrainingSettings
from snakechat.data.ragged_arrays import Ragged, optional_ragged
from snakechat.modeling.attention import Segments, make_segments
from snakechat.modeling.models import acceleration, copy_to_device, round_up
from snakechat.workflow import processes as ranks
from snakechat.workflow.errors import InputError, warn

Ids = Sequence[int] | np.ndarray
# (row, tokens) of each row, the largest first.
SizedRows = list[tuple[int, int]]

# Rows considered for one micro-batch: enough to fill it, few enough to search.
MAX_CANDIDATES = 1024
# Widths of packed sequences that pack_rows tries, as multiples of the longest row.
WIDTH_FACTORS = (1, 1.25, 1.5, 2)
# Cost of a token outside attention, as the number of attended positions that cost as much. For a
# small model this is 6 times its hidden size.
TOKEN_COST = 4096
# Prompts of which the rows are taken that have no responses yet.
NUM_PROMPTS = 256


def num_steps(num_rows: int, batch_size: int, epochs: int) -> int:
    """Return the optimizer steps of a run. The last batch of an epoch may be smaller."""
    return epochs * -(-num_rows // batch_size)


def epoch_batches(
    num_rows: int, global_batch_size: int, epochs: int, seed: int, max_steps: int | None = None
) -> list[list[np.ndarray]]:
    """Return the row numbers of each optimizer step of each epoch, in a new order each epoch.

    max_steps: Epochs that begin after this number of steps are dropped.
    """
    if max_steps is not None:
        steps = max(num_steps(num_rows, global_batch_size, 1), 1)
        epochs = min(epochs, num_steps(max_steps, steps, 1))
    orders = (np.random.default_rng([seed, epoch]).permutation(num_rows) for epoch in range(epochs))
    starts = range(0, num_rows, global_batch_size)
    return [[order[start : start + global_batch_size] for start in starts] for order in orders]


def training_batches(
    num_rows: int, batch_size: int, settings: TrainingSettings
) -> list[np.ndarray]:
    """Return the row numbers of each step of a training run.

    Prints a warning if all rows do not fill a batch.
    """
    if num_rows < batch_size:
        warn(
            f"{num_rows} training rows are fewer than a batch of {batch_size}: each epoch is one"
            f" step of {num_rows} rows"
        )
    epochs = epoch_batches(num_rows, batch_size, settings.epochs, settings.seed, settings.max_steps)
    return [rows for epoch in epochs for rows in epoch][: settings.max_steps]


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


class MicroBatch(NamedTuple):
    """One forward and backward pass of a rank.

    rows: row numbers in the order of the batch's sequences.
    counted: False for a dummy micro-batch, which a rank runs only to take part in collectives.
    is_last: whether it is the last of the optimizer step.
    """

    rows: list[int]
    batch: TokenBatch
    counted: bool
    is_last: bool


class Examples:
    """Rows to train or to evaluate on: a prompt and the same number of responses each.

    Args:
        prompts, responses: token ids by row (a Ragged, or lists).
        trained: with one response each, 1 for each of its target tokens and 0 for the others; by
            default, all tokens of a response are targets.
    """

    def __init__(
        self,
        prompts: Sequence[Ids] | Ragged,
        *responses: Sequence[Ids] | Ragged,
        trained: Sequence[Ids] | Ragged | None = None,
    ) -> None:
        self.prompts, self.responses, self.trained = prompts, responses, trained
        self.prompt_lengths = sequence_lengths(prompts)
        self.response_lengths = np.stack([sequence_lengths(ids) for ids in responses])

    @classmethod
    def read(cls, folder: Path, split: str, *responses: str) -> "Examples":
        """Read a split (train or eval) of a folder of tokens. responses: chosen, rejected."""
        ids = [Ragged(folder, f"{split}.{name}") for name in ("prompt", *responses)]
        # Of recipes with train_on: all_turns.
        return cls(*ids, trained=optional_ragged(folder, f"{split}.trained"))

    def __len__(self) -> int:
        return len(self.prompts)

    def select(self, rows: Sequence[int] | np.ndarray) -> "Examples":
        """Return the given rows, in their order."""
        prompts, *responses = (
            [ids[row] for row in rows] for ids in (self.prompts, *self.responses)
        )
        trained = None if self.trained is None else [self.trained[row] for row in rows]
        return Examples(prompts, *responses, trained=trained)

    def mismatched(self, max_length: int, split: str) -> "Examples":
        """Return each prompt with a response to another one.

        It is the first response of the next row that has another prompt: weights repeat rows side
        by side, and the responses to a prompt are often next to each other. Responses are
        truncated to max_length tokens with their prompt.

        split: train or eval, for the error.

        Raises:
            InputError: All prompts are the same.
        """
        # The last row of each run of equal prompts; the first row of all follows the last.
        lengths, prompts, rows = self.prompt_lengths, self.prompts, range(len(self))
        ends = [
            row
            for row, following in zip(rows, [*rows[1:], 0], strict=False)
            if lengths[row] != lengths[following]
            or not np.array_equal(prompts[row], prompts[following])
        ]
        if not ends:
            raise InputError(
                f"the {split} split: all {len(self)} prompts are the same, but loss: kto compares"
                " responses with responses to other prompts: add rows with other prompts, or use"
                " another loss"
            )
        responses = []
        for row, prompt_length in enumerate(lengths):
            other = (ends[bisect_left(ends, row) % len(ends)] + 1) % len(self)
            # Of rows that are labelled good or bad, one of the responses is empty.
            ids = next(ids[other] for ids in self.responses if len(ids[other]))
            responses.append(ids[: max_length - prompt_length])
        return Examples(self.prompts, responses)

    def num_tokens(self, with_prompts: bool) -> np.ndarray:
        """Return the number of target tokens [n] of each row; see collate.

        with_prompts: The tokens of a prompt count once, however many responses the row has.
        """
        if with_prompts:
            return self.response_lengths.sum(axis=0) + self.prompt_lengths - 1
        if self.trained is None:
            return self.response_lengths.sum(axis=0)
        return np.array([np.sum(self.trained[row]) for row in range(len(self))], np.int64)

    def largest_rows(self, packing: bool) -> np.ndarray:
        """Return the longest rows, enough for a micro-batch of each process."""
        sizes = self._sizes(np.arange(len(self)), packing)
        rows = np.argsort(-sizes, kind="stable")
        needed = ranks.world_size() * acceleration().micro_batch_tokens
        number = int(np.searchsorted(np.cumsum(sizes[rows]), needed, side="right"))
        return rows[: max(number, ranks.world_size())]

    def _sizes(self, rows: np.ndarray, packing: bool) -> np.ndarray:
        """Return the tokens [n] of each row in a micro-batch."""
        prompts, responses = self.prompt_lengths[rows], self.response_lengths[:, rows]
        if packing:
            return prompts + responses.sum(axis=0)
        return len(responses) * (prompts + responses.max(axis=0))

    def micro_batches(
        self, rows: np.ndarray, packing: bool, device: torch.device, with_prompts: bool = False
    ) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the given rows; see collate for the arguments."""
        choices, sizes = acceleration(), self._sizes(rows, packing)
        limit, multiple = choices.micro_batch_tokens, choices.pad_to_multiple_of
        distributed = distribute_rows(
            rows, sizes, limit, packing, ranks.rank(), ranks.world_size(), multiple
        )
        for number, (packed, counted) in enumerate(distributed, start=1):
            batch = self.collate(packed, packing, device, with_prompts, multiple)
            batch_rows = [row for sequence in packed for row in sequence]
            yield MicroBatch(batch_rows, batch, counted, number == len(distributed))

    def collate(
        self,
        packed: list[list[int]],
        packing: bool,
        device: torch.device,
        with_prompts: bool = False,
        multiple: int = 1,
    ) -> TokenBatch:
        """Build the tensors of a micro-batch.

        Args:
            packed: rows of each packed sequence; without packing, one row per entry.
            with_prompts: tokens of the prompt are target tokens too. The first token of a prompt is
                never a target, because no hidden state predicts it.
            multiple: packed sequences are padded to a multiple of this number of tokens. Others are
                not: a family that cannot be packed may have no position for the padding.
        """
        # Rows of each sequence, and which of their responses it has.
        sequences: list[tuple[list[int], Sequence[Any]]] = [
            (rows, self.responses) for rows in packed
        ]
        if not packing:
            # A sequence for each response, all first responses before all second ones.
            sequences = [(rows, [responses]) for responses in self.responses for rows in packed]
        parts = [
            [(row, [self.prompts[row], *(ids[row] for ids in responses)]) for row in rows]
            for rows, responses in sequences
        ]
        longest = max(sum(len(ids) for _, row in rows for ids in row) for rows in parts)
        width = round_up(longest, multiple if packing else 1)
        # Ids, positions, numbers of rows and of segments.
        table = np.zeros((4, len(parts) * width), np.int64)
        # Number of the response, flat indices of its sequence, and which of these are targets.
        found: list[tuple[int, np.ndarray, np.ndarray]] = []
        for number, rows in enumerate(parts):
            start = number * width
            for place, (row, (prompt, *responses)) in enumerate(rows, start=1):
                of_prompt = start + np.arange(len(prompt))
                for segment, part in enumerate((prompt, *responses)):
                    index = start + np.arange(len(part))
                    positions = np.arange(len(part)) + (len(prompt) if segment else 0)
                    table[0, index], table[1, index] = part, positions
                    table[2:, index] = [[place], [segment]]
                    start += len(part)
                    if segment == 0:
                        continue
                    index = np.concatenate([of_prompt, index])
                    targets = np.arange(1 if with_prompts else len(prompt), len(index))
                    if self.trained is not None and not with_prompts:
                        targets = len(prompt) + np.flatnonzero(self.trained[row])
                    found.append((segment, index, targets))
        # All first responses before all second ones.
        found.sort(key=lambda each: each[0])

        def to_device(array: np.ndarray | list[Any]) -> torch.Tensor:
            return copy_to_device(torch.from_numpy(np.asarray(array)), device)

        ids, positions, row_ids, segment_ids = table.reshape(4, -1, width)
        batch = TokenBatch(
            to_device(ids),
            state_index=to_device(np.concatenate([index[each - 1] for _, index, each in found])),
            target_index=to_device(np.concatenate([index[each] for _, index, each in found])),
            last_index=to_device([index[-1] for _, index, _ in found]),
            target_lengths=to_device([len(targets) for *_, targets in found]),
        )
        if packing:
            return batch._replace(
                position_ids=to_device(positions),
                segments=make_segments(row_ids, segment_ids, to_device),
            )
        # Without a mask, OPT sums one of floats, for which GPUs have no deterministic kernel.
        return batch._replace(attention_mask=torch.ones_like(batch.input_ids))


def sequence_lengths(sequences: Sequence[Ids] | Ragged) -> np.ndarray:
    """Return the length [n] of each sequence."""
    if isinstance(sequences, Ragged):
        return sequences.lengths
    return np.array([len(ids) for ids in sequences])


def distribute_rows(
    rows: Sequence[int] | np.ndarray,
    sizes: Sequence[int] | np.ndarray,
    micro_batch_tokens: int,
    packing: bool,
    rank: int = 0,
    world_size: int = 1,
    multiple: int = 1,
) -> list[tuple[list[list[int]], bool]]:
    """Distribute the rows of a step over ranks, and this rank's over micro-batches.

    Args:
        sizes: tokens of each row.
        micro_batch_tokens: limit of tokens in a micro-batch, padding included. A longer row gets a
            micro-batch by itself.
        packing: several rows share a packed sequence. Otherwise each row has sequences by itself.
        multiple: packed sequences are padded to a multiple of this number of tokens.

    Returns:
        (packed sequences of rows, whether they count) of each micro-batch. All ranks have the same
        number of micro-batches, because each one communicates: a rank with fewer repeats the
        shortest row of the step, which does not count.
    """
    sized_rows = sort_by_size(rows, sizes)
    # Ranks take turns forwards and backwards, so that no rank gets the longest row of each turn.
    turns = [*range(world_size), *reversed(range(world_size))]
    micro_batches: list[list[list[list[int]]]] = []
    for number in range(world_size):
        own = [
            sized for index, sized in enumerate(sized_rows) if turns[index % len(turns)] == number
        ]
        if packing:
            micro_batches.append(pack_rows(own, micro_batch_tokens, multiple))
        else:
            buckets = bucket_by_size(own, micro_batch_tokens)
            micro_batches.append([[[row] for row in bucket] for bucket in buckets])
    num_dummies = max(map(len, micro_batches)) - len(micro_batches[rank])
    dummy = [[sized_rows[-1][0]]]
    return [(packed, True) for packed in micro_batches[rank]] + [(dummy, False)] * num_dummies


def sort_by_size(rows: Sequence[int] | np.ndarray, sizes: Sequence[int] | np.ndarray) -> SizedRows:
    """Return rows with their sizes, the largest first."""
    order = np.argsort(-np.asarray(sizes), kind="stable")
    return [(int(rows[index]), int(sizes[index])) for index in order]


def bucket_by_size(
    sized_rows: SizedRows, max_tokens: int, balanced: bool = False
) -> list[list[int]]:
    """Group rows of similar size into buckets of at most `max_tokens`, padding included.

    balanced: Whether buckets have about equally many rows, if these fit. A token of a batch takes a
    GPU about as long whichever number of rows it has: 64 and 64 rows end earlier than 120 and 8,
    and need less memory.
    """
    buckets: list[SizedRows] = []
    for row in sized_rows:
        # All rows of a bucket are padded to its first one.
        if not buckets or (len(buckets[-1]) + 1) * buckets[-1][0][1] > max_tokens:
            buckets.append([])
        buckets[-1].append(row)
    if balanced:
        number = -(-len(sized_rows) // len(buckets))
        starts = range(0, len(sized_rows), number)
        equal = [sized_rows[start : start + number] for start in starts]
        if all(len(bucket) * bucket[0][1] <= max_tokens for bucket in equal):
            buckets = equal
    return [[row for row, _ in bucket] for bucket in buckets]


def prompt_examples(
    prompts: Sequence[Ids] | Ragged, max_response_length: int, num_responses: int
) -> Examples:
    """Return the first prompts with tokens of prompts as responses, for a job without responses."""
    prompts = [prompts[row] for row in range(min(len(prompts), NUM_PROMPTS))]
    text = np.concatenate([np.asarray(ids) for ids in prompts])
    # However many responses share a prompt, two show whether they are packed correctly.
    responses = [
        np.resize(np.roll(text, number), max_response_length)
        for number in range(min(num_responses, 2))
    ]
    return Examples(prompts, *([ids] * len(prompts) for ids in responses))


def pack_rows(sized_rows: SizedRows, max_tokens: int, multiple: int = 1) -> list[list[list[int]]]:
    """Return the packed sequences of rows of micro-batches of at most `max_tokens`, with padding.

    The packed sequences of a micro-batch are as wide as its longest row, or wider by one of
    WIDTH_FACTORS, whichever costs least per token that is not padding.

    multiple: the packed sequences will be padded to a multiple of this number of tokens.
    """
    micro_batches = []
    while sized_rows:
        longest = sized_rows[0][1]
        limit = max(max_tokens, round_up(longest, multiple))
        widths = {min(round_up(int(factor * longest), multiple), limit) for factor in WIDTH_FACTORS}
        packed, remaining, _ = min(
            (
                first_fit(sized_rows[:MAX_CANDIDATES], width, max_tokens, multiple)
                for width in sorted(widths)
            ),
            key=lambda candidate: candidate[2],
        )
        micro_batches.append(packed)
        sized_rows = remaining + sized_rows[MAX_CANDIDATES:]
    return micro_batches


def first_fit(
    sized_rows: SizedRows, width: int, max_tokens: int, multiple: int = 1
) -> tuple[list[list[int]], SizedRows, float]:
    """Fill the packed sequences of one micro-batch by first-fit decreasing (Johnson 1973).

    Each row goes into the first sequence of `width` tokens that has space for it. Returns the
    packed sequences, the rows that did not fit, and the cost per token without padding.
    """
    free = np.full(max(1, max_tokens // width), width)
    packed: list[list[int]] = [[] for _ in free]
    remaining = []
    for row, length in sized_rows:
        index = int(np.argmax(free >= length))
        if free[index] < length:
            remaining.append((row, length))
        else:
            free[index] -= length
            packed[index].append(row)
    used = (width - free)[free < width]
    padded = round_up(used.max(), multiple)
    cost = padded * len(used) * (TOKEN_COST + padded) / used.sum()
    return [rows for rows in packed if rows], remaining, cost
