"""Batching: which rows make an optimizer step, and how ranks and micro-batches divide them."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch

from snakechat.config.settings import TrainingSettings
from snakechat.data.ragged_arrays import Ragged, optional_ragged
from snakechat.modeling import acceleration
from snakechat.modeling.packing import Ids, Row, TokenBatch, collate, pack_rows
from snakechat.workflow import processes as ranks
from snakechat.workflow.errors import InputError, warn

# Prompts of which the rows are taken that have no responses yet.
NUM_PROMPTS = 256
# Tokens of the shorter one of two rows on which passes are compared.
NUM_SHORT = 24


def num_steps(num_rows: int, batch_size: int, epochs: int) -> int:
    """Return the optimizer steps of a run. The last batch of an epoch may be smaller."""
    return epochs * -(-num_rows // batch_size)


def global_batches(num_rows: int, batch_size: int, epochs: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the row numbers of each optimizer step, in a new order each epoch."""
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(num_rows)
        for start in range(0, num_rows, batch_size):
            yield order[start : start + batch_size]


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
    batches = global_batches(num_rows, batch_size, settings.epochs, settings.seed)
    return list(islice(batches, settings.max_steps))


def epoch_batches(
    num_rows: int, global_batch_size: int, epochs: int, seed: int, max_steps: int | None
) -> list[list[np.ndarray]]:
    """Return the row numbers of each batch of each epoch that training_batches begins."""
    steps = num_steps(num_rows, global_batch_size, epochs=1)
    if max_steps is not None:
        epochs = min(epochs, -(-max_steps // steps))
    batches = list(global_batches(num_rows, global_batch_size, epochs, seed))
    return [batches[start : start + steps] for start in range(0, len(batches), steps)]


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

        Args:
            split: train or eval, for the error.

        Raises:
            InputError: All prompts are the same.
        """
        responses = []
        for other, prompt_length in zip(
            self._other_prompts(split), self.prompt_lengths, strict=True
        ):
            # Of rows that are labelled good or bad, one of the responses is empty.
            ids = next(ids[other] for ids in self.responses if len(ids[other]))
            responses.append(ids[: max_length - prompt_length])
        return Examples(self.prompts, responses)

    def _other_prompts(self, split: str) -> np.ndarray:
        """Return the next row [n] with another prompt of each row; the first follows the last."""
        number, other, others = len(self), -1, np.zeros(len(self), np.int64)
        # Twice: the rows at the end are followed by those at the start.
        for row in [*range(number)[::-1], *range(number)[::-1]]:
            following = (row + 1) % number
            if self.prompt_lengths[row] != self.prompt_lengths[following] or not np.array_equal(
                self.prompts[row], self.prompts[following]
            ):
                other = following
            others[row] = other
        if other < 0:
            raise InputError(
                f"the {split} split: all {number} prompts are the same, but loss: kto compares"
                " responses with responses to other prompts: add rows with other prompts, or use"
                " another loss"
            )
        return others

    def num_tokens(self, with_prompts: bool) -> np.ndarray:
        """Return the number of target tokens [n] of each row. See packing.collate."""
        if with_prompts:
            return self.response_lengths.sum(axis=0) + self.prompt_lengths - 1
        if self.trained is None:
            return self.response_lengths.sum(axis=0)
        return np.array([np.sum(self.trained[row]) for row in range(len(self))], np.int64)

    def largest_rows(self, packing: bool) -> np.ndarray:
        """Return the longest rows, enough for a micro-batch of each process."""
        sizes = self._sizes(np.arange(len(self)), packing)
        rows = np.argsort(-sizes, kind="stable")
        needed = ranks.world_size() * acceleration.current().micro_batch_tokens
        number = int(np.searchsorted(np.cumsum(sizes[rows]), needed, side="right"))
        return rows[: max(number, ranks.world_size())]

    def _sizes(self, rows: np.ndarray, packing: bool) -> np.ndarray:
        """Return the tokens [n] of each row in a micro-batch."""
        prompts, responses = self.prompt_lengths[rows], self.response_lengths[:, rows]
        if packing:
            return prompts + responses.sum(axis=0)
        return len(responses) * (prompts + responses.max(axis=0))

    def micro_batches(
        self,
        rows: np.ndarray,
        packing: bool,
        device: torch.device,
        with_prompts: bool = False,
    ) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the given rows.

        See distribute_rows for the first two arguments and packing.collate for the last two.
        """
        choices = acceleration.current()
        multiple = choices.pad_to_multiple_of
        distributed = distribute_rows(
            rows,
            self._sizes(rows, packing),
            choices.micro_batch_tokens,
            packing,
            ranks.rank(),
            ranks.world_size(),
            multiple,
        )
        for number, (packed, counted) in enumerate(distributed, start=1):
            sequences = [
                [(self.prompts[row], [ids[row] for ids in self.responses]) for row in sequence]
                for sequence in packed
            ]
            batch_rows, trained = [row for sequence in packed for row in sequence], None
            if self.trained is not None:
                trained = [self.trained[row] for row in batch_rows]
            batch = collate(sequences, packing, device, with_prompts, multiple, trained)
            yield MicroBatch(batch_rows, batch, counted, number == len(distributed))


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
    by_rank = [
        [sized for index, sized in enumerate(sized_rows) if turns[index % len(turns)] == number]
        for number in range(world_size)
    ]
    if packing:
        micro_batches = [pack_rows(sized, micro_batch_tokens, multiple) for sized in by_rank]
    else:
        micro_batches = [
            [[[row] for row in bucket] for bucket in bucket_by_size(sized, micro_batch_tokens)]
            for sized in by_rank
        ]
    num_dummies = max(map(len, micro_batches)) - len(micro_batches[rank])
    dummy = [[sized_rows[-1][0]]]
    return [(packed, True) for packed in micro_batches[rank]] + [(dummy, False)] * num_dummies


def sort_by_size(
    rows: Sequence[int] | np.ndarray, sizes: Sequence[int] | np.ndarray
) -> list[tuple[int, int]]:
    """Return (row, size) of each row, the largest first."""
    order = np.argsort(-np.asarray(sizes), kind="stable")
    return [(int(rows[index]), int(sizes[index])) for index in order]


def bucket_by_size(
    sized_rows: list[tuple[int, int]], max_tokens: int, balanced: bool = False
) -> list[list[int]]:
    """Group rows of similar size into buckets of at most `max_tokens`, padding included.

    Args:
        sized_rows: (row, size) of each row, the largest first.
        balanced: Whether buckets have about equally many rows, if these fit. A token of a batch
            takes a GPU about as long whichever number of rows it has: 64 and 64 rows end earlier
            than 120 and 8, and need less memory.
    """
    buckets: list[list[tuple[int, int]]] = []
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


def probe_rows(examples: Examples, limit: int) -> list[Row]:
    """Return the longest row and, of the others, the one with about NUM_SHORT tokens.

    Args:
        limit: longer ones are truncated to this number of tokens.
    """
    lengths = examples.prompt_lengths + examples.response_lengths.max(axis=0)
    longest = int(lengths.argmax())
    distances = np.abs(lengths - NUM_SHORT)
    distances[longest] = distances.max() + 1
    rows = examples.select([longest, int(distances.argmin())])
    return [
        _truncated(prompt, [ids[row] for ids in rows.responses], limit)
        for row, prompt in enumerate(cast(list[Ids], rows.prompts))
    ]


def _truncated(prompt: Ids, responses: list[Ids], limit: int) -> Row:
    """Truncate the start of a prompt and the ends of its responses, which keep half of the room."""
    room = max(limit // 2, limit - max(map(len, responses)))
    prompt = prompt[-room:]
    return prompt, [ids[: limit - len(prompt)] for ids in responses]
