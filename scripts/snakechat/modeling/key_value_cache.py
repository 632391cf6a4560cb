"""A key-value cache whose tensors are allocated once.

Shapes: b rows of a batch, H heads, T tokens, D dimensions of a head.
"""

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
