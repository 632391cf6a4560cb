"""Generation: sampled responses from a model's forward passes with a key-value cache.

A prompt is processed once, however many responses are sampled for it. Rows that have ended leave
the batch. On a GPU, the pass that samples a token may be captured (fixed_decoding.py).

Shapes: n prompts, G responses of each (num_generations), R tokens of the longest response; b rows
of a batch, V entries of the vocabulary.
"""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from snakechat.modeling import acceleration
from snakechat.modeling.acceleration import copy_to_device, round_up
from snakechat.modeling.batching import bucket_by_size, sort_by_size
from snakechat.modeling.fixed_decoding import (
    FixedDecoder,
    all_finite,
    can_be_captured,
    count_unfinished,
    takes_dense_mask,
)
from snakechat.modeling.key_value_cache import (
    FREE_FRACTION,
    MEMORY_FRACTION,
    default_generate_tokens,
    make_cache,
)
from snakechat.modeling.partitions import Gather, no_gather
from snakechat.modeling.token_sampling import sample_tokens
from snakechat.workflow import deterministic

# Ended rows leave a batch once at most this fraction of its rows is unfinished.
COMPACTION_THRESHOLD = 7 / 8
# Lengths of a FixedDecoder are multiples of this number, so that one serves several batches.
DECODER_LENGTH_MULTIPLE = 64

# Token ids [g][row] of each response, and the log-probability of each token or None.
Generations = tuple[list[list[list[int]]], list[list[list[float]]] | None]


class SamplingSettings(Protocol):
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
    """Samples responses from the current weights of a model in training.

    Attributes:
        num_ranks: adjacent processes that sample the same responses together.
    """

    num_ranks: int

    def update(self, model: PreTrainedModel, gather: Gather = no_gather) -> None:
        """Use the model's current weights from now on; all processes call this function."""

    def sample(self, prompts: Sequence[Sequence[int]]) -> Generations:
        """Sample responses to prompts of token ids.

        Returns:
            The ids of each response, with the stop id if one was sampled: responses[g][row]; and
            the log-probability of each token under the distribution that it was sampled from, or
            None if a training forward pass gives the same.
        """

    def sleep(self) -> None:
        """Free memory until the next update, which has to come before the next sample."""

    def close(self) -> None:
        """Free what the sampler holds."""


def make_sampler(
    settings: SamplingSettings,
    stop_ids: Sequence[int],
    micro_batch_tokens: int,
    folder: Path,
    vllm_tensor_parallel_size: int = 1,
) -> Sampler:
    """Create the sampler of settings.generation_backend.

    Args:
        stop_ids: token ids that end a response (snakechat.data.special_tokens).
        folder: a model of the same architecture, from which vLLM starts.
        vllm_tensor_parallel_size: processes that divide the weights of a vLLM engine.
    """
    if settings.generation_backend == "vllm":
        from snakechat.modeling.vllm_sampler import VllmSampler

        return VllmSampler(settings, stop_ids, folder, vllm_tensor_parallel_size)
    return HfSampler(settings, stop_ids, micro_batch_tokens)


class HfSampler:
    """Samples from the trained model itself."""

    num_ranks = 1

    def __init__(
        self, settings: SamplingSettings, stop_ids: Sequence[int], micro_batch_tokens: int
    ) -> None:
        self.settings, self.stop_ids = settings, stop_ids
        self.micro_batch_tokens = micro_batch_tokens

    def update(self, model: PreTrainedModel, gather: Gather = no_gather) -> None:
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

    def sleep(self) -> None:
        """Do nothing: the sampler holds no memory."""

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
    own_rows: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Sample responses to prompts from the model's full distribution, without top-k or top-p.

    Prompts of similar length share a batch. What is sampled for a row does not depend on the other
    rows of its batch, except where rounding moves a token's probability.

    Args:
        stop_ids: token ids that end a response.
        temperature: 0 selects the most likely token.
        micro_batch_tokens: limit of tokens in a batch on a CPU, padding and all responses included,
            unless the placement has generate_tokens.
        own_rows: the prompts that this process samples responses to; all of them by default. The
            random numbers of a prompt are the same in any case.

    Returns:
        Token ids of each response, with the stop id if one was sampled: responses[g][row].
    """
    shape = len(prompts), num_generations, max_response_length
    # From the CPU's random number generator, whatever the device.
    uniforms = torch.rand(shape, dtype=torch.float64)
    if own_rows is not None:
        prompts, uniforms = [prompts[row] for row in own_rows], uniforms[list(own_rows)]
    responses: list[list[list[int]]] = [[[]] * len(prompts) for _ in range(num_generations)]
    stops = copy_to_device(torch.tensor(stop_ids), model.device)
    choices = acceleration.current()
    is_captured = choices.cuda_graphs and can_be_captured(model)
    multiple = DECODER_LENGTH_MULTIPLE if is_captured else 1
    lengths = [len(prompt) + max_response_length for prompt in prompts]
    sized_rows = [
        (row, num_generations * round_up(length, multiple))
        for row, length in sort_by_size(range(len(prompts)), lengths)
    ]
    max_tokens = max_batch_tokens(model, micro_batch_tokens)
    decoder: FixedDecoder | None = None
    batches = bucket_by_size(sized_rows, max_tokens)
    if is_captured:
        batches = balanced(batches, dict(sized_rows), max_tokens)
    for rows in batches:
        num_rows, length = len(rows) * num_generations, round_up(lengths[rows[0]], multiple)
        if is_captured and not (decoder and decoder.fits(num_rows, length)):
            # Free the memory of the old one first. Its graphs have ended: their tokens were read.
            decoder = None
            most_rows = max(map(len, batches)) * num_generations
            decoder = FixedDecoder(
                model,
                max(num_rows, most_rows),
                length,
                max_response_length,
                stops,
                temperature,
                choices.stop_check_steps,
            )
        padded = pad_left([prompts[row] for row in rows], stop_ids[0], model.device)
        randoms = copy_to_device(uniforms[rows], model.device)
        tokens = generate_batch(model, *padded, randoms, stops, temperature, decoder).tolist()
        for index, ids in enumerate(tokens):
            ends = (column for column, token in enumerate(ids) if token in stop_ids)
            length = next(ends, len(ids) - 1) + 1
            responses[index % num_generations][rows[index // num_generations]] = ids[:length]
    return responses


def balanced(
    batches: list[list[int]], sizes: Mapping[int, int], max_tokens: int
) -> list[list[int]]:
    """Return as many batches of about equally many rows, if these fit; otherwise the same ones.

    A token of a batch takes about the same time whichever number of rows it has: 64 and 64 rows end
    earlier than 120 and 8, and need less memory.

    Args:
        batches: Rows, the largest first.
        sizes: Tokens of each row.
        max_tokens: Limit of tokens in a batch, padding included.
    """
    rows = [row for batch in batches for row in batch]
    number = -(-len(rows) // len(batches))
    equal = [rows[start : start + number] for start in range(0, len(rows), number)]
    fit = all(len(batch) * sizes[batch[0]] <= max_tokens for batch in equal)
    return equal if fit else batches


def max_batch_tokens(model: PreTrainedModel, micro_batch_tokens: int) -> int:
    """Return the maximum number of tokens in a batch.

    It is the placement's generate_tokens or, by default, as many as the memory of the GPU allows.
    With deterministic: true, the memory that is free at the moment does not count: a resumed run
    samples in the same batches.
    """
    limit, device = acceleration.current().generate_tokens, model.device
    if limit is not None or device.type != "cuda":
        return limit or micro_batch_tokens
    free, total = torch.cuda.mem_get_info(device)
    # Torch keeps memory that it does not use.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    memory = MEMORY_FRACTION * total
    if not deterministic.are_requested():
        memory = min(memory, FREE_FRACTION * free)
    return default_generate_tokens(model.config, model.dtype.itemsize, micro_batch_tokens, memory)


def generate_batch(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    uniforms: torch.Tensor,
    stops: torch.Tensor,
    temperature: float,
    decoder: FixedDecoder | None = None,
) -> torch.Tensor:
    """Generate responses [b * G, R] to left-padded prompts [b, T], those of a prompt adjacent.

    Args:
        input_ids, attention_mask: [b, T].
        uniforms: [b, G, R] in [0, 1), the only source of randomness.
        stops: Token ids that end a response.
        decoder: Samples all tokens but the first of each response, if given.

    Returns:
        Token ids, filled with a stop id after the end of a response.
    """
    prompts_mask, stop_check_steps = attention_mask, acceleration.current().stop_check_steps
    uniforms = uniforms.flatten(end_dim=1)
    new_mask = attention_mask.new_ones(len(attention_mask), uniforms.shape[1])
    attention_mask = torch.cat([attention_mask, new_mask], dim=1)
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    # A decoder has a cache of its own.
    cache = make_cache(model.config, (prompts_mask if decoder else attention_mask).shape[1])
    has_dense_mask = takes_dense_mask(model, cache)
    tokens = stops[0].expand_as(uniforms).clone()
    # The rows of `tokens` in the current batch, and whether each has ended.
    rows = torch.arange(len(tokens), device=tokens.device)
    ended = torch.zeros_like(rows, dtype=torch.bool)
    start, end = 0, input_ids.shape[1]
    for step in range(tokens.shape[1]):
        mask = attention_mask[:, :end]
        if step > 0 and has_dense_mask:
            mask = mask.bool()[:, None, None]
        logits = next_logits(model, cache, input_ids, mask, positions[:, start:end])
        # Responses per row of the batch: G in the first step, which has one row per prompt.
        copies = len(rows) // len(logits)
        step_uniforms = uniforms[rows, step].view(-1, copies)
        sampled = sample_tokens(logits, step_uniforms, temperature).flatten()
        sampled = sampled.masked_fill(ended, stops[0])
        tokens[rows, step] = sampled
        ended = torch.isin(sampled, stops)
        if step > 0 and (step + 1) % stop_check_steps:
            input_ids, start, end = sampled[:, None], end, end + 1
            continue
        num_unfinished = count_unfinished(ended, all_finite(logits))
        if num_unfinished == 0:
            break
        if decoder or copies > 1 or num_unfinished <= COMPACTION_THRESHOLD * len(rows):
            kept = (~ended).nonzero().squeeze(1)
            sources = kept // copies
            rows, sampled, ended = rows[kept], sampled[kept], ended[kept]
            if decoder:
                tokens[rows] = decoder.run(cache, prompts_mask, sources, sampled, uniforms[rows])
                break
            cache.reorder_cache(cast(torch.LongTensor, sources))
            attention_mask, positions = attention_mask[sources], positions[sources]
        input_ids, start, end = sampled[:, None], end, end + 1
    return tokens


def next_logits(
    model: PreTrainedModel,
    cache: DynamicCache,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Add tokens to a cache, and return the logits [b, V] that follow them.

    Args:
        input_ids, positions: [b, new tokens]. attention_mask: [b, all tokens], or bool
            [b, 1, 1, all tokens] for one new token.
    """
    # BLOOM derives positions from the mask.
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    return model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        **({"position_ids": positions} if takes_positions else {}),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]


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
    return copy_to_device(input_ids, device), copy_to_device(attention_mask, device)
