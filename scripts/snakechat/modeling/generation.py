"""Generation: sampled responses from a model's forward passes, in batches of similar length.

A prompt is processed once, however many responses are sampled for it; decoding.py samples their
tokens. Samplers are what RLHF samples with: the trained model itself, or vLLM (vllm_sampler.py).
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from snakechat.modeling import acceleration
from snakechat.modeling.acceleration import copy_to_device, round_up
from snakechat.modeling.batching import bucket_by_size, sort_by_size
from snakechat.modeling.captured_decoding import FixedDecoder, can_be_captured
from snakechat.modeling.decoding import Decoder, pad_left
from snakechat.modeling.key_value_cache import (
    FREE_FRACTION,
    MEMORY_FRACTION,
    default_generate_tokens,
)
from snakechat.modeling.lora import merged_adapters
from snakechat.modeling.models import Gather, no_gather
from snakechat.workflow import deterministic

# A decoder stays in memory while a model trains if both take at most this fraction of a GPU.
KEPT_FRACTION = 0.8

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


class Sampler(ABC):
    """Samples responses from the current weights of a model in training.

    Attributes:
        num_ranks: adjacent processes that sample the same responses together.
        asleep_bytes: memory of the GPU that it keeps while it sleeps, outside of torch's tensors.
    """

    num_ranks = 1
    asleep_bytes = 0

    @abstractmethod
    def update(self, model: PreTrainedModel, gather: Gather = no_gather) -> None:
        """Use the model's current weights from now on; all processes call this function."""

    @abstractmethod
    def sample(self, prompts: Sequence[Sequence[int]]) -> Generations:
        """Sample responses to prompts of token ids.

        Returns:
            The ids of each response, with the stop id if one was sampled: responses[g][row]; and
            the log-probability of each token under the distribution that it was sampled from, or
            None if a training forward pass gives the same.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Free memory until the next update, which has to come before the next sample."""

    @abstractmethod
    def close(self) -> None:
        """Free what the sampler holds."""

    def step_ended(self) -> None:  # noqa: B027 most samplers need not know
        """Learn that a step of the training has ended, whose peak of memory is known."""


class HfSampler(Sampler):
    """Samples from the trained model itself.

    Its decoder, with the captured graphs, stays in memory from the second step of a training on,
    if the first one has left enough of a GPU's memory.
    """

    def __init__(self, settings: SamplingSettings, stop_ids: Sequence[int]) -> None:
        self.settings, self.stop_ids = settings, stop_ids
        self.kept = KeptDecoder()
        # Bytes that the decoder may keep while the model trains.
        self.allowance = 0.0

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
            settings.num_generations,
            kept=self.kept,
        )
        return responses, None

    def sleep(self) -> None:
        """Free the decoder, unless it may stay."""
        if self.kept.decoder and self.kept.decoder.num_bytes > self.allowance:
            self.kept.decoder = None

    def step_ended(self) -> None:
        """Keep the decoder from now on, if the step without it has left enough memory."""
        device = self.model.device
        if device.type == "cuda" and not self.kept.decoder:
            _, total = torch.cuda.mem_get_info(device)
            self.allowance = KEPT_FRACTION * total - torch.cuda.max_memory_allocated(device)

    def close(self) -> None:
        """Free the decoder."""
        self.kept.decoder = None


class KeptDecoder:
    """The decoder of earlier batches, for further ones.

    Attributes:
        max_tokens: Limit of tokens in a batch, from the memory that was free without the decoder.
    """

    def __init__(self) -> None:
        self.decoder: FixedDecoder | None = None
        self.max_tokens = 0
        self.addresses: list[int] = []

    def get(
        self, model: PreTrainedModel, stops: torch.Tensor, temperature: float, capacity: int
    ) -> FixedDecoder:
        """Return a decoder for the weights where they are now; the arguments are FixedDecoder's."""
        # Graphs read weights by their addresses, and ZeRO 3 gathers them anywhere.
        tensors = [*model.parameters(), *model.buffers()]
        addresses = [tensor.data_ptr() for tensor in tensors]
        if not self.decoder or self.decoder.capacity < capacity or addresses != self.addresses:
            # Free the old one first. Its graphs have ended: their tokens were read.
            self.decoder = None
            self.decoder = FixedDecoder(model, stops, temperature, capacity)
            self.addresses = addresses
        return self.decoder


@torch.no_grad()
def sample_responses(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    stop_ids: Sequence[int],
    max_response_length: int,
    temperature: float,
    num_generations: int = 1,
    own_rows: Sequence[int] | None = None,
    kept: KeptDecoder | None = None,
) -> list[list[list[int]]]:
    """Sample responses to prompts from the model's full distribution, without top-k or top-p.

    Prompts of similar length share a batch. What is sampled for a row does not depend on the other
    rows of its batch, except where rounding moves a token's probability.

    Args:
        stop_ids: token ids that end a response.
        temperature: 0 selects the most likely token.
        own_rows: the prompts that this process samples responses to; all of them by default. The
            random numbers of a prompt are the same in any case.
        kept: the decoder of earlier calls with the same arguments, for this one and later ones.

    Returns:
        Token ids of each response, with the stop id if one was sampled: responses[g][row].
    """
    shape = len(prompts), num_generations, max_response_length
    # From the CPU's random number generator, whatever the device.
    uniforms = torch.rand(shape, dtype=torch.float64)
    if own_rows is not None:
        prompts, uniforms = [prompts[row] for row in own_rows], uniforms[list(own_rows)]
    responses: list[list[list[int]]] = [[[]] * len(prompts) for _ in range(num_generations)]
    stops, kept = copy_to_device(torch.tensor(stop_ids), model.device), kept or KeptDecoder()
    is_captured = acceleration.current().cuda_graphs and can_be_captured(model)
    multiple = (FixedDecoder if is_captured else Decoder).multiple
    lengths = [len(prompt) + max_response_length for prompt in prompts]
    sized_rows = [
        (row, num_generations * round_up(length, multiple))
        for row, length in sort_by_size(range(len(prompts)), lengths)
    ]
    if not kept.decoder:
        kept.max_tokens = max_batch_tokens(model)
    batches = bucket_by_size(sized_rows, kept.max_tokens, balanced=is_captured)
    sizes = dict(sized_rows)
    capacity = max(len(rows) * sizes[rows[0]] for rows in batches)
    with merged_adapters(model) if is_captured else contextlib.nullcontext():
        for rows in batches:
            decoder = (
                kept.get(model, stops, temperature, capacity)
                if is_captured
                else Decoder(model, stops, temperature)
            )
            padded = pad_left([prompts[row] for row in rows], stop_ids[0], model.device)
            randoms = copy_to_device(uniforms[rows], model.device)
            tokens = decoder.generate(*padded, randoms).tolist()
            for index, ids in enumerate(tokens):
                ends = (column for column, token in enumerate(ids) if token in stop_ids)
                end = next(ends, len(ids) - 1) + 1
                responses[index % num_generations][rows[index // num_generations]] = ids[:end]
    return responses


def max_batch_tokens(model: PreTrainedModel) -> int:
    """Return the maximum number of tokens in a batch, padding and all responses included.

    It is the placement's generate_tokens or, by default, as many as the memory of the GPU allows.
    With deterministic: true, the memory that is free at the moment does not count: a resumed run
    samples in the same batches.
    """
    choices, device = acceleration.current(), model.device
    micro_batch_tokens = choices.micro_batch_tokens
    if choices.generate_tokens is not None or device.type != "cuda":
        return choices.generate_tokens or micro_batch_tokens
    free, total = torch.cuda.mem_get_info(device)
    # Torch keeps memory that it does not use.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    memory = MEMORY_FRACTION * total
    if not deterministic.are_requested():
        memory = min(memory, FREE_FRACTION * free)
    return default_generate_tokens(model.config, model.dtype.itemsize, micro_batch_tokens, memory)
