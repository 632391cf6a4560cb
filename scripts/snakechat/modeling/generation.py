"""Generation: sampled responses from a model's forward passes, in batches of similar length.

A prompt is processed once, however many responses are sampled for it; decoding.py samples their
tokens. Samplers are what RLHF samples with: the trained model itself, or vLLM (vllm_sampler.py).
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from snakechat.modeling import acceleration
from snakechat.modeling.acceleration import copy_to_device, round_up
from snakechat.modeling.attention import head_size
from snakechat.modeling.batching import bucket_by_size, sort_by_size
from snakechat.modeling.captured_decoding import FixedDecoder, can_be_captured
from snakechat.modeling.decoding import Decoder, pad_left
from snakechat.modeling.lora import merged_adapters
from snakechat.modeling.models import Gather, no_gather
from snakechat.workflow import processes

# Fractions of a GPU's total memory, and of its free memory, that the keys and values of a batch may
# use by default.
MEMORY_FRACTION, FREE_FRACTION = 1 / 8, 1 / 2
# A decoder stays in memory while a model trains if both take at most this fraction of a GPU.
KEPT_FRACTION = 0.8

# Token ids [g][row] of each response, and the log-probability of each token or None.
Generations = tuple[list[list[list[int]]], list[list[list[float]]] | None]


class Sampler(ABC):
    """Samples responses from the current weights of a model, without top-k or top-p.

    Args:
        stop_ids: Token ids that end a response.
        temperature: 0 selects the most likely token.
        num_generations: Responses to each prompt.

    Attributes:
        has_copy: Whether it samples from a copy of the model.
        num_ranks: Adjacent processes that sample the same responses together.
        asleep_bytes: Memory of the GPU that it keeps while it sleeps, outside of torch's tensors.
    """

    has_copy, num_ranks, asleep_bytes = False, 1, 0

    def __init__(
        self,
        stop_ids: Sequence[int],
        max_response_length: int,
        temperature: float,
        num_generations: int = 1,
    ) -> None:
        self.stop_ids, self.temperature = list(stop_ids), temperature
        self.max_response_length, self.num_generations = max_response_length, num_generations

    @abstractmethod
    def update(self, model: PreTrainedModel, gather: Gather = no_gather) -> None:
        """Use the model's current weights from now on; all processes call this function."""

    @abstractmethod
    def sample(self, prompts: Sequence[Sequence[int]], own_rows: Sequence[int]) -> Generations:
        """Sample responses to prompts of token ids, with torch's random numbers of the CPU.

        Args:
            prompts: Those of all processes, whose random numbers are the same.
            own_rows: The prompts that this process samples responses to.

        Returns:
            The ids of each response to the own prompts, with the stop id if one was sampled:
            responses[g][row]; and the log-probability of each token under the distribution that it
            was sampled from, or None if a training forward pass gives the same.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Free memory until the next update, which has to come before the next sample."""

    def step_ended(self) -> None:  # noqa: B027 most samplers need not know
        """Learn that a step of the training has ended, whose peak of memory is known."""


class HfSampler(Sampler):
    """Samples from the model itself. Prompts of similar length share a batch.

    What is sampled for a row does not depend on the other rows of its batch, except where rounding
    moves a token's probability.

    Its decoder, with the captured graphs, stays in memory from the second step of a training on,
    if the first one has left enough of a GPU's memory.
    """

    decoder: FixedDecoder | None = None
    # Limit of tokens in a batch, from the memory that was free without the decoder.
    max_tokens = 0
    # Bytes that the decoder may keep while the model trains.
    allowance = 0.0
    addresses: Sequence[int] = ()

    def update(self, model: PreTrainedModel, gather: Gather = no_gather) -> None:
        """Use the model's current weights from now on."""
        self.model = model

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], own_rows: Sequence[int]) -> Generations:
        """Sample responses; see Sampler.sample."""
        model, num_generations = self.model, self.num_generations
        shape = len(prompts), num_generations, self.max_response_length
        uniforms = torch.rand(shape, dtype=torch.float64)[list(own_rows)]
        prompts = [prompts[row] for row in own_rows]
        responses: list[list[list[int]]] = [[[]] * len(prompts) for _ in range(num_generations)]
        stops = copy_to_device(torch.tensor(self.stop_ids), model.device)
        is_captured = acceleration.current().cuda_graphs and can_be_captured(model)
        multiple = (FixedDecoder if is_captured else Decoder).multiple
        lengths = [len(prompt) + self.max_response_length for prompt in prompts]
        sized_rows = [
            (row, num_generations * round_up(length, multiple))
            for row, length in sort_by_size(range(len(prompts)), lengths)
        ]
        if not self.decoder:
            self.max_tokens = max_batch_tokens(model)
        batches = bucket_by_size(sized_rows, self.max_tokens, balanced=is_captured)
        sizes = dict(sized_rows)
        capacity = max(len(rows) * sizes[rows[0]] for rows in batches)
        with merged_adapters(model) if is_captured else contextlib.nullcontext():
            for rows in batches:
                decoder = (
                    self.fixed_decoder(stops, capacity)
                    if is_captured
                    else Decoder(model, stops, self.temperature)
                )
                padded = pad_left([prompts[row] for row in rows], self.stop_ids[0], model.device)
                randoms = copy_to_device(uniforms[rows], model.device)
                tokens = decoder.generate(*padded, randoms).tolist()
                for index, ids in enumerate(tokens):
                    ends = (column for column, token in enumerate(ids) if token in self.stop_ids)
                    end = next(ends, len(ids) - 1) + 1
                    responses[index % num_generations][rows[index // num_generations]] = ids[:end]
        return responses, None

    def fixed_decoder(self, stops: torch.Tensor, capacity: int) -> FixedDecoder:
        """Return a decoder for the weights where they are now; the arguments are FixedDecoder's."""
        # Graphs read weights by their addresses, and ZeRO 3 gathers them anywhere.
        tensors = [*self.model.parameters(), *self.model.buffers()]
        addresses = [tensor.data_ptr() for tensor in tensors]
        if not self.decoder or self.decoder.capacity < capacity or addresses != self.addresses:
            # Free the old one first. Its graphs have ended: their tokens were read.
            self.decoder, self.addresses = None, addresses
            self.decoder = FixedDecoder(self.model, stops, self.temperature, capacity)
        return self.decoder

    def sleep(self) -> None:
        """Free the decoder, unless it may stay."""
        if self.decoder and self.decoder.num_bytes > self.allowance:
            self.decoder = None

    def step_ended(self) -> None:
        """Keep the decoder from now on, if the step without it has left enough memory."""
        device = self.model.device
        if device.type == "cuda" and not self.decoder:
            _, total = torch.cuda.mem_get_info(device)
            self.allowance = KEPT_FRACTION * total - torch.cuda.max_memory_allocated(device)


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
    if not processes.uses_deterministic_kernels():
        memory = min(memory, FREE_FRACTION * free)
    return default_generate_tokens(model.config, model.dtype.itemsize, micro_batch_tokens, memory)


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
