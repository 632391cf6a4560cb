"""Key-value caches whose tensors are allocated once.

Shapes: b rows of a batch, H heads, T tokens, L columns, D dimensions of a head.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from snakechat.modeling.attention import head_size

# Fractions of a GPU's total memory, and of its free memory, that the keys and values of a batch may
# use by default.
MEMORY_FRACTION, FREE_FRACTION = 1 / 8, 1 / 2


def cache_elements(config: PreTrainedConfig) -> int:
    """Return the number of elements of the keys and values of a token in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_size(config)


def default_generate_tokens(
    config: PreTrainedConfig, element_bytes: int, micro_batch_tokens: int, memory: float
) -> int:
    """Return the default of generate_tokens: the maximum number of tokens in a batch of responses.

    Sampling a token reads all weights once for the whole batch, so larger batches are faster.

    Args:
        element_bytes: Bytes of an element of the cache.
        memory: Bytes that keys and values may use.
    """
    return max(micro_batch_tokens, int(memory / (element_bytes * cache_elements(config))))


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
    """Keys and values [b, H, T, D] of a layer in tensors that are allocated once.

    transformers' DynamicLayer copies all earlier keys and values for each new token.
    """

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self.max_length, self.length = max_length, 0
        self.buffers: list[torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values, and return all of them."""
        states = key_states, value_states
        if self.buffers is None:
            shapes = [(*new.shape[:2], self.max_length, new.shape[3]) for new in states]
            self.buffers = [new.new_empty(shape) for new, shape in zip(states, shapes, strict=True)]
        start, self.length = self.length, self.length + key_states.shape[2]
        for buffer, new in zip(self.buffers, states, strict=True):
            buffer[:, :, start : self.length] = new
        keys, values = (buffer[:, :, : self.length] for buffer in self.buffers)
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of cached tokens."""
        return self.length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Select rows of the batch, each any number of times."""
        assert self.buffers is not None
        self.buffers = [buffer[beam_idx] for buffer in self.buffers]


class FixedLayer(DynamicLayer):
    """Keys and values [b, H, L, D] of a layer at addresses that all batches share.

    Each token is written to a column, and the columns of all tokens are returned: the caller masks
    those that have none yet.

    Args:
        capacity: b * L of the largest batch.
        column: [1], where the next token is written. The caller advances it.
    """

    def __init__(self, capacity: int, column: torch.Tensor) -> None:
        super().__init__()
        self.capacity, self.column = capacity, column
        self.buffers: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def start(self, prompts: PreallocatedLayer, sources: torch.Tensor, length: int) -> None:
        """Start a batch from the keys and values of its prompts, which are freed.

        Args:
            sources: [b], the row in `prompts` of each row.
            length: L of the batch.
        """
        assert prompts.buffers is not None
        # Uninitialized memory may contain NaN, which a mask does not remove.
        self.buffers = self.buffers or [
            new.new_zeros(self.capacity * new.shape[1] * new.shape[3]) for new in prompts.buffers
        ]
        self.states = []
        for buffer, new in zip(self.buffers, prompts.buffers, strict=True):
            states = view_of_start(buffer, (len(sources), new.shape[1], length, new.shape[3]))
            states[:, :, : prompts.length] = new[sources, :, : prompts.length]
            self.states.append(states)
        prompts.buffers = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of a token, and return all columns."""
        keys, values = (
            states.index_copy_(2, self.column, new)
            for states, new in zip(self.states, (key_states, value_states), strict=True)
        )
        return keys, values

    def get_seq_length(self) -> int:
        """Return 0: the mask says which columns have tokens."""
        return 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Select rows of the batch, which then has as many."""
        self.states = [
            copy_to_start(buffer, states[beam_idx])
            for buffer, states in zip(self.buffers, self.states, strict=True)
        ]


def view_of_start(buffer: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the first elements of a flat buffer in a shape."""
    return buffer[: math.prod(shape)].view(shape)


def copy_to_start(buffer: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the first elements of a flat buffer; return them in its shape."""
    return view_of_start(buffer, tensor.shape).copy_(tensor)
