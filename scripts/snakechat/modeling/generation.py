"""Generation: sampled responses from a model's forward passes with a key-value cache.

A prompt is processed once, however many responses are sampled for it. Rows that have ended leave
the batch. Keys and values are written into tensors that are allocated once.

Shapes: n prompts, G responses of each (num_generations), R tokens of the longest response; b rows
of a batch, V entries of the vocabulary.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch.nn import functional
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from snakechat.modeling.batching import bucket_by_size, sort_by_size

# Ended rows leave a batch once at most this fraction of its rows is unfinished.
COMPACTION_THRESHOLD = 7 / 8
# Probabilities that are summed at a time to sample a token.
CDF_BLOCK = 64

# Token ids [g][row] of each response, and the log-probability of each token or None.
Generations = tuple[list[list[list[int]]], list[list[list[float]]] | None]


class GenerationSettings(Protocol):
    """Settings of a recipe that samplers read."""

    @property
    def generation_backend(self) -> str: ...
    @property
    def num_generations(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def dtype(self) -> str: ...
    @property
    def max_prompt_length(self) -> int: ...
    @property
    def max_response_length(self) -> int: ...


class Sampler(Protocol):
    """Samples responses from the current weights of a model in training."""

    def update(self, model: PreTrainedModel) -> None:
        """Use the model's current weights from now on."""

    def sample(self, prompts: Sequence[Sequence[int]]) -> Generations:
        """Sample responses to prompts of token ids.

        Returns:
            The ids of each response, with the stop id if one was sampled: responses[g][row]; and
            the log-probability of each token under the distribution that it was sampled from, or
            None if a training forward pass gives the same.
        """

    def close(self) -> None:
        """Free what the sampler holds."""


def make_sampler(
    settings: GenerationSettings, stop_ids: Sequence[int], micro_batch_tokens: int, folder: Path
) -> Sampler:
    """Create the sampler of settings.generation_backend.

    Args:
        stop_ids: token ids that end a response (snakechat.data.special_tokens).
        folder: a model of the same architecture, from which vLLM starts.
    """
    if settings.generation_backend == "vllm":
        from snakechat.modeling.vllm_sampler import VllmSampler

        return VllmSampler(settings, stop_ids, folder)
    return HfSampler(settings, stop_ids, micro_batch_tokens)


class HfSampler:
    """Samples from the trained model itself."""

    def __init__(
        self, settings: GenerationSettings, stop_ids: Sequence[int], micro_batch_tokens: int
    ) -> None:
        self.settings, self.stop_ids = settings, stop_ids
        self.micro_batch_tokens = micro_batch_tokens

    def update(self, model: PreTrainedModel) -> None:
        """Use the model's current weights from now on."""
        self.model = model

    def sample(self, prompts: Sequence[Sequence[int]]) -> Generations:
        """Sample responses; see Sampler.sample."""
        settings = self.settings
        responses = sample_responses(
            self.model,
            prompts,
            self.stop_ids,
            settings.max_response_length,
            settings.temperature,
            self.micro_batch_tokens,
            settings.num_generations,
        )
        return responses, None

    def close(self) -> None:
        """Do nothing: the sampler holds no resources."""


@torch.no_grad()
def sample_responses(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    stop_ids: Sequence[int],
    max_response_length: int,
    temperature: float,
    micro_batch_tokens: int,
    num_generations: int = 1,
) -> list[list[list[int]]]:
    """Sample responses to prompts from the model's full distribution, without top-k or top-p.

    Prompts of similar length share a batch. What is sampled for a row does not depend on the other
    rows of its batch, except where rounding moves a token's probability.

    Args:
        stop_ids: token ids that end a response.
        temperature: 0 selects the most likely token.
        micro_batch_tokens: limit of tokens in a batch: padding and all responses included.

    Returns:
        Token ids of each response, with the stop id if one was sampled: responses[g][row].
    """
    shape = len(prompts), num_generations, max_response_length
    # From the CPU's random number generator, whatever the device.
    uniforms = torch.rand(shape, dtype=torch.float64).to(model.device)
    responses: list[list[list[int]]] = [[[]] * len(prompts) for _ in range(num_generations)]
    sizes = [num_generations * (len(prompt) + max_response_length) for prompt in prompts]
    sized_rows = sort_by_size(range(len(prompts)), sizes)
    for rows in bucket_by_size(sized_rows, micro_batch_tokens):
        padded = pad_left([prompts[row] for row in rows], stop_ids[0], model.device)
        tokens = generate_tokens(model, *padded, uniforms[rows], stop_ids, temperature).tolist()
        for index, ids in enumerate(tokens):
            stops = (column for column, token in enumerate(ids) if token in stop_ids)
            length = next(stops, len(ids) - 1) + 1
            responses[index % num_generations][rows[index // num_generations]] = ids[:length]
    return responses


def generate_tokens(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    uniforms: torch.Tensor,
    stop_ids: Sequence[int],
    temperature: float,
) -> torch.Tensor:
    """Generate responses [b * G, R] to left-padded prompts [b, T], those of a prompt adjacent.

    Args:
        input_ids, attention_mask: [b, T].
        uniforms: [b, G, R] in [0, 1), the only source of randomness.

    Returns:
        Token ids, filled with a stop id after the end of a response.
    """
    stops = torch.tensor(stop_ids, device=input_ids.device)
    uniforms = uniforms.flatten(end_dim=1)
    new_mask = attention_mask.new_ones(len(attention_mask), uniforms.shape[1])
    attention_mask = torch.cat([attention_mask, new_mask], dim=1)
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    # BLOOM derives positions from the mask.
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    cache = make_cache(model.config, attention_mask.shape[1])
    tokens = torch.full_like(uniforms, stop_ids[0], dtype=torch.int64)
    # The rows of `tokens` in the current batch, and whether each has ended.
    rows = torch.arange(len(tokens), device=tokens.device)
    ended = torch.zeros_like(rows, dtype=torch.bool)
    start, end = 0, input_ids.shape[1]
    for step in range(tokens.shape[1]):
        logits = model(
            input_ids=input_ids,
            attention_mask=attention_mask[:, :end],
            **({"position_ids": positions[:, start:end]} if takes_positions else {}),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        # Responses per row of the batch: G in the first step, which has one row per prompt.
        copies = len(rows) // len(logits)
        step_uniforms = uniforms[rows, step].view(-1, copies)
        sampled = sample_tokens(logits, step_uniforms, temperature).flatten()
        sampled = sampled.masked_fill(ended, stop_ids[0])
        tokens[rows, step] = sampled
        ended = torch.isin(sampled, stops)
        num_unfinished = len(rows) - int(ended.sum())
        if num_unfinished == 0:
            break
        if copies > 1 or num_unfinished <= COMPACTION_THRESHOLD * len(rows):
            kept = (~ended).nonzero().squeeze(1)
            sources = kept // copies
            cache.reorder_cache(cast(torch.LongTensor, sources))
            attention_mask, positions = attention_mask[sources], positions[sources]
            rows, sampled, ended = rows[kept], sampled[kept], ended[kept]
        input_ids, start, end = sampled[:, None], end, end + 1
    return tokens


def sample_tokens(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float) -> torch.Tensor:
    """Sample tokens [b, c] by inverting the cumulative distribution of logits [b, V].

    Needs one random number in `uniforms` [b, c] per token, where torch.multinomial draws one per
    entry of the vocabulary. Probabilities are summed per block first, then within the token's
    block: a cumulative sum over the whole vocabulary takes four times as long as everything else.
    """
    if temperature == 0:
        return logits.argmax(dim=1, keepdim=True).expand_as(uniforms)
    probabilities = torch.softmax(logits.float() / temperature, dim=1)
    probabilities = functional.pad(probabilities, (0, -probabilities.shape[1] % CDF_BLOCK))
    blocks = probabilities.view(len(logits), -1, CDF_BLOCK)
    block, uniforms = invert_cdf(blocks.sum(dim=2), uniforms)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    column, _ = invert_cdf(blocks[rows, block], uniforms[..., None])
    return block * CDF_BLOCK + column.squeeze(-1)


def invert_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the entries at which the normalized cumulative sum exceeds each uniform number.

    Args:
        weights: [..., n], not normalized.
        uniforms: [..., c] in [0, 1).

    Returns:
        Indices [..., c] of the entries, and the fraction [..., c] of each entry's weight that lies
        below its uniform number.
    """
    # fp32 would lose rare tokens in the sum.
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    # Rounding must not select an index after the last entry.
    targets = uniforms.clamp(0, 1 - 2**-52) * cumulative[..., -1:]
    index = torch.searchsorted(cumulative, targets, right=True)
    weight = weights.gather(-1, index).double()
    return index, (targets - cumulative.gather(-1, index) + weight) / weight


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


def pad_left(
    sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad sequences on the left. Returns input_ids and attention_mask, [B, T] each.

    The mask follows from the lengths, so pad_id may be any id.
    """
    longest = max(len(sequence) for sequence in sequences)
    input_ids = torch.full((len(sequences), longest), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, sequence in enumerate(sequences):
        input_ids[row, longest - len(sequence) :] = torch.as_tensor(np.asarray(sequence, np.int64))
        attention_mask[row, longest - len(sequence) :] = 1
    return input_ids.to(device), attention_mask.to(device)
