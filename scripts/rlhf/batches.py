"""Batches: which rows make an optimizer step, and how they share the passes of it."""

import numpy as np
import torch


def num_steps(num_rows, batch_size, epochs):
    """Optimizer steps of a run: the last batch of an epoch may be smaller, none is left out."""
    return epochs * -(-num_rows // batch_size)


def global_batches(num_rows, batch_size, epochs, seed):
    """Row numbers of each optimizer step, in a new order each epoch."""
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(num_rows)
        for start in range(0, num_rows, batch_size):
            yield order[start : start + batch_size]


def micro_batches(rows, lengths, max_tokens):
    """Share rows among passes of at most max_tokens tokens with padding, like lengths together.

    rows: row numbers; lengths: length of each of them. A row longer than max_tokens passes alone.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    batch, longest = [], 0
    for index in order:
        if batch and (len(batch) + 1) * longest > max_tokens:
            yield batch
            batch = []
        longest = lengths[index] if not batch else longest
        batch.append(rows[index])
    if batch:
        yield batch


def pad(sequences, pad_id, device, side="right"):
    """Stack sequences of ids. Returns input_ids and attention_mask, each [B, T] (int64).

    The mask comes from the lengths, so that pad_id may be any id.
    """
    longest = max(len(sequence) for sequence in sequences)
    input_ids = torch.full((len(sequences), longest), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, sequence in enumerate(sequences):
        place = slice(0, len(sequence)) if side == "right" else slice(longest - len(sequence), None)
        input_ids[row, place] = torch.as_tensor(np.asarray(sequence, dtype=np.int64))
        attention_mask[row, place] = 1
    return input_ids.to(device), attention_mask.to(device)


def span_mask(starts, ends, width, device):
    """Mask [B, width] (bool) that is true from starts[b] to before ends[b]."""
    positions = torch.arange(width)
    starts, ends = torch.as_tensor(starts), torch.as_tensor(ends)
    return ((positions >= starts[:, None]) & (positions < ends[:, None])).to(device)
