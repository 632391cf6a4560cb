"""Decoding: the tokens of a batch of responses, sampled one after the other with a key-value cache.

Shapes: n prompts, G responses of each; b rows of a batch, c tokens of each; R tokens of the longest
response, T of the longest prompt, L of a prompt and its response; V entries of the vocabulary;
H heads of D dimensions.
"""

import inspect
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from snakechat.modeling.models import acceleration, copy_to_device, round_up, supports_packing
from snakechat.workflow.errors import InputError

# Ended rows leave a batch once at most this fraction of its rows is unfinished.
COMPACTION_THRESHOLD = 7 / 8
# Probabilities that are summed at a time to sample a token.
CDF_BLOCK = 64
# The largest weight of a distribution as an integer. The sum of 32,768 of them fits 64 bits.
LARGEST_WEIGHT = 2**48


def make_cache(config: PreTrainedConfig, max_length: int) -> DynamicCache:
    """Create an empty key-value cache with space for `max_length` tokens in each row."""
    cache = DynamicCache(config=config)
    # Layers with a sliding window keep their class: they drop tokens.
    cache.layers = [
        PreallocatedLayer(max_length) if type(layer) is DynamicLayer else layer
        for layer in cache.layers
    ]
    return cache


class PreallocatedLayer(DynamicLayer):
    """Keys and values [b, H, max_length, D] of a layer in tensors that are allocated once.

    transformers' DynamicLayer copies all earlier keys and values for each new token.
    """

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.max_length, self.length = max_length, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values, and return all of them."""
        if self.keys is None:
            self.keys, self.values = (
                new.new_empty(*new.shape[:2], self.max_length, new.shape[3])
                for new in (key_states, value_states)
            )
        keys, values = self.keys, cast(torch.Tensor, self.values)
        start, self.length = self.length, self.length + key_states.shape[2]
        keys[:, :, start : self.length] = key_states
        values[:, :, start : self.length] = value_states
        return keys[:, :, : self.length], values[:, :, : self.length]

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        return self.length


def next_logits(
    model: PreTrainedModel,
    cache: DynamicCache,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Add tokens to a cache, and return the logits [b, V] that follow them.

    input_ids, positions: [b, new tokens]. attention_mask: [b, all tokens], or bool
    [b, 1, 1, all tokens] for one new token.
    """
    arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
    # BLOOM derives positions from the mask.
    if "position_ids" in inspect.signature(model.forward).parameters:
        arguments["position_ids"] = positions
    return model(**arguments, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]


def pad_left(
    sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad sequences on the left. Returns input_ids and attention_mask, [n, T] each.

    The mask follows from the lengths, so pad_id may be any id.
    """
    rows = [torch.as_tensor(np.asarray(ids, np.int64)) for ids in sequences]
    input_ids = pad_sequence(rows, True, pad_id, padding_side="left")
    attention_mask = pad_sequence([torch.ones_like(row) for row in rows], True, padding_side="left")
    return copy_to_device(input_ids, device), copy_to_device(attention_mask, device)


def takes_dense_mask(model: PreTrainedModel) -> bool:
    """Return whether a model takes a mask [b, 1, 1, L] of a token, and its cache keeps all tokens.

    From a mask [b, L], transformers makes that one at each token, and reads it on the host first.
    """
    return supports_packing(model) and all(
        isinstance(layer, PreallocatedLayer) for layer in make_cache(model.config, 1).layers
    )


def count_unfinished(ended: torch.Tensor, is_finite: torch.Tensor) -> int:
    """Return the number of rows that have not ended: bool [b]. Waits for the device.

    Raises InputError unless all logits of the last tokens are finite.
    """
    unfinished, finite = torch.stack([(~ended).sum(), is_finite.long()]).tolist()
    if not finite:
        raise InputError(
            "the logits of a sampled token are not finite: the model's weights or activations are"
            " too large: train with a lower learning rate, or in bf16 in place of fp16"
        )
    return unfinished


def all_finite(logits: torch.Tensor) -> torch.Tensor:
    """Return whether each row of logits [b, V] has a largest one; -inf stands for no token."""
    return logits.amax(dim=1).isfinite().all()


class Decoder:
    """Samples responses to prompts, batch by batch.

    Args:
        stops: Ids that end a response.
        temperature: 0 selects the most likely token.

    Attributes:
        num_rows: Responses of the batch. Those that have ended leave it when others remain.
        state: Tensors of the remaining rows.
        number: The number of the next token [1], the same in all rows.
        column: The column of the token before it [1], in the cache and the mask.
        length, end: Columns of the mask, and those that are used.
        has_cache: Whether it has a cache of its own, apart from the cache of the prompts.
        multiple: Of the length.
    """

    has_cache, multiple, num_rows = False, 1, 1

    def __init__(self, model: PreTrainedModel, stops: torch.Tensor, temperature: float) -> None:
        self.model, self.stops, self.temperature = model, stops, temperature
        self.takes_dense_mask = takes_dense_mask(model)
        self.state = dict[str, torch.Tensor]()
        self.number, self.column = (stops.new_empty(1, dtype=torch.int64) for _ in range(2))
        self.is_finite = torch.ones((), dtype=torch.bool, device=stops.device)

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, uniforms: torch.Tensor
    ) -> torch.Tensor:
        """Generate responses [n * G, R] to left-padded prompts [n, T], G in a row for each prompt.

        uniforms: [n, G, R] in [0, 1), the only source of randomness. Returns token ids, filled with
        a stop id after the end of a response.
        """
        copies, uniforms = uniforms.shape[1], uniforms.flatten(end_dim=1)
        self.num_rows, limit = uniforms.shape
        length = input_ids.shape[1] + (0 if self.has_cache else limit)
        prompts = make_cache(self.model.config, length)
        positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = next_logits(self.model, prompts, input_ids, attention_mask, positions)
        first = sample_tokens(logits, uniforms[:, 0].view(-1, copies), self.temperature).flatten()
        tokens = self.stops[0].expand_as(uniforms).clone()
        tokens[:, 0] = first
        ended, number = torch.isin(first, self.stops), 1
        if not count_unfinished(ended, all_finite(logits)):
            return tokens
        rows = (~ended).nonzero().squeeze(1)
        self.start(prompts, attention_mask, rows // copies, tokens[rows], uniforms[rows])
        while number < limit:
            steps = min(acceleration().stop_check_steps, limit - number)
            for _ in range(steps):
                self.step()
            number += steps
            num_unfinished = count_unfinished(self.state["ended"], self.is_finite)
            if number < limit and num_unfinished and not self.fits_less(num_unfinished):
                continue
            tokens[rows] = self.state["tokens"][: len(rows)]
            if num_unfinished == 0 or number == limit:
                break
            kept = (~self.state["ended"][: len(rows)]).nonzero().squeeze(1)
            rows = rows[kept]
            self.keep(kept)
        return tokens

    def start(
        self,
        prompts: DynamicCache,
        attention_mask: torch.Tensor,
        sources: torch.Tensor,
        tokens: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> None:
        """Start a batch after its first tokens.

        prompts: Keys and values of the prompts. attention_mask: [n, T], 0 for padding on the left.
        sources: [b], the prompt of each row. tokens: [b, R], of which the first one is sampled.
        uniforms: [b, R], the random numbers of all tokens.
        """
        mask = attention_mask[sources]
        positions, self.end = mask.sum(dim=1, keepdim=True), mask.shape[1]
        self.length = round_up(self.end + tokens.shape[1], self.multiple)
        self.number.fill_(1)
        self.column.fill_(self.end)
        self.is_finite.fill_(True)
        self.state = {
            "input_ids": tokens[:, :1].clone(),
            "positions": positions,
            "ended": torch.zeros_like(sources, dtype=torch.bool),
            "uniforms": uniforms,
            "tokens": tokens,
            "mask": torch.nn.functional.pad(
                mask.bool() if self.takes_dense_mask else mask, (0, self.length - self.end)
            ),
        }
        self.start_cache(prompts, sources)

    def start_cache(self, prompts: DynamicCache, sources: torch.Tensor) -> None:
        """Start from the keys and values of the prompt [b] of each row."""
        self.cache = prompts
        self.cache.reorder_cache(cast(torch.LongTensor, sources))

    def fits_less(self, num_rows: int) -> bool:
        """Return whether the batch is made smaller for some of its rows."""
        return num_rows <= COMPACTION_THRESHOLD * len(self.state["ended"])

    def keep(self, rows: torch.Tensor) -> None:
        """Keep the given rows of the batch."""
        self.state = {name: tensor[rows] for name, tensor in self.state.items()}
        self.cache.reorder_cache(cast(torch.LongTensor, rows))

    def step(self) -> None:
        """Sample a token of each row."""
        self.end += 1
        self.sample()

    def sample(self) -> None:
        """Sample a token of each row; no number of the host changes."""
        state = self.state
        state["mask"].index_fill_(1, self.column, 1)
        mask = state["mask"][:, : self.end]
        mask = mask[:, None, None] if self.takes_dense_mask else mask
        logits = next_logits(self.model, self.cache, state["input_ids"], mask, state["positions"])
        uniforms = state["uniforms"].index_select(1, self.number)
        sampled = sample_tokens(logits, uniforms, self.temperature)
        sampled = torch.where(state["ended"][:, None], self.stops[0], sampled)
        state["tokens"].index_copy_(1, self.number, sampled)
        state["ended"] |= (sampled == self.stops).any(dim=1)
        self.is_finite &= all_finite(logits)
        state["input_ids"].copy_(sampled)
        state["positions"] += 1
        self.number += 1
        self.column += 1


# --- tokens by one random number each -----------------------------------------------------------


def sample_tokens(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float) -> torch.Tensor:
    """Sample tokens [b, c] by inverting the cumulative distribution of logits [b, V].

    Needs one random number in `uniforms` [b, c] per token, where torch.multinomial draws one per
    entry of the vocabulary. Probabilities are summed per block first, then within the token's
    block: a cumulative sum over the whole vocabulary takes four times as long as everything else.
    """
    if temperature == 0:
        return logits.argmax(dim=1, keepdim=True).expand_as(uniforms)
    probabilities = torch.softmax(logits.float() / temperature, dim=1)
    probabilities = torch.nn.functional.pad(probabilities, (0, -probabilities.shape[1] % CDF_BLOCK))
    blocks = probabilities.view(len(logits), -1, CDF_BLOCK)
    block, uniforms = invert_cdf(blocks.sum(dim=2), uniforms)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    column, _ = invert_cdf(blocks[rows, block], uniforms[..., None])
    # Logits that are not finite give any token, and callers check them later. On a GPU, an index
    # outside of the vocabulary would end the process before.
    return (block * CDF_BLOCK + column.squeeze(-1)).clamp(max=logits.shape[1] - 1)


def invert_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the entries at which the normalized cumulative sum exceeds each uniform number.

    weights: [..., m], not normalized. uniforms: [..., c] in [0, 1). Returns the indices [..., c] of
    the entries, any ones if a weight is not finite; and the fraction [..., c] of each entry's
    weight that lies below its uniform number.
    """
    # As integers: their sums are exact in any order, and GPUs have no deterministic kernel for
    # cumulative sums of floats. fp32 would lose rare tokens in the sum.
    largest = weights.amax(dim=-1, keepdim=True).double()
    counts = (weights / largest * LARGEST_WEIGHT).long()
    cumulative = counts.cumsum(dim=-1)
    targets = uniforms.clamp(0, 1 - 2**-52) * cumulative[..., -1:]
    index = torch.searchsorted(cumulative, targets.long(), right=True)
    index = index.clamp(0, weights.shape[-1] - 1)
    count = counts.gather(-1, index)
    return index, (targets - (cumulative.gather(-1, index) - count)) / count
