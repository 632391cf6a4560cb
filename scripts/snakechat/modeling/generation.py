"""Generation: sampled responses from a model's forward passes, in batches of similar length.

A prompt is processed once, however many responses are sampled for it; decoding.py samples their
tokens. Shapes: as there.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from snakechat.modeling.attention import head_size
from snakechat.modeling.batching import bucket_by_size, sort_by_size
from snakechat.modeling.decoding import Decoder, make_cache, next_logits, pad_left, takes_dense_mask
from snakechat.modeling.loading import merged_adapters
from snakechat.modeling.models import (
    Gather,
    acceleration,
    copy_to_device,
    describe,
    no_gather,
    round_up,
    whole_shape,
)
from snakechat.workflow import processes
from snakechat.workflow.errors import InputError, is_out_of_memory, warn

# Fractions of a GPU's total memory, and of its free memory, that the keys and values of a batch may
# use by default.
MEMORY_FRACTION, FREE_FRACTION = 1 / 8, 1 / 2
# A decoder stays in memory while a model trains if both take at most this fraction of a GPU.
KEPT_FRACTION = 0.8
# A graph of this size or smaller is not halved. A step of a few rows takes as long as a step of one
# row: the time to read the weights.
SMALLEST_GRAPH = 8
# Lengths of a FixedDecoder are multiples of this number, so that a graph serves several batches.
LENGTH_MULTIPLE = 64
# Names of a layer's tensors in the state of a FixedDecoder, before its number.
KEYS_VALUES = ("keys", "values")

# Whether a graph can have the pass of a model.
_captures: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()

# Token ids [g][row] of each response, and the log-probability of each token or None.
Generations = tuple[list[list[list[int]]], list[list[list[float]]] | None]


class Sampler:
    """Samples responses from a model itself, without top-k or top-p; VllmSampler has a copy of it.

    Prompts of similar length share a batch. What is sampled for a row does not depend on the other
    rows of its batch, except where rounding moves a token's probability.

    Its decoder, with the captured graphs, stays in memory from the second step of a training on,
    if the first one has left enough of a GPU's memory.

    Args:
        stop_ids: Token ids that end a response.
        temperature: 0 selects the most likely token.
        num_generations: Responses to each prompt.

    Attributes:
        has_copy: Whether it samples from a copy of the model.
        num_ranks: Adjacent processes that sample the same responses together.
        asleep_bytes: Memory of the GPU that it keeps while it sleeps, outside of torch's tensors.
        max_tokens: Limit of tokens in a batch, from the memory that was free without the decoder.
        allowance: Bytes that the decoder may keep while the model trains.
    """

    has_copy, num_ranks, asleep_bytes = False, 1, 0
    max_tokens, allowance = 0, 0.0
    decoder: "FixedDecoder | None" = None
    addresses: Sequence[int] = ()

    def __init__(
        self,
        stop_ids: Sequence[int],
        max_response_length: int,
        temperature: float,
        num_generations: int = 1,
    ) -> None:
        self.stop_ids, self.temperature = list(stop_ids), temperature
        self.max_response_length, self.num_generations = max_response_length, num_generations

    def update(self, model: PreTrainedModel, gather: Gather = no_gather) -> None:
        """Use the model's current weights from now on; all processes call this function."""
        self.model = model

    @torch.no_grad()
    def sample(self, prompts: Sequence[Sequence[int]], own_rows: Sequence[int]) -> Generations:
        """Sample responses to prompts of token ids, with torch's random numbers of the CPU.

        Returns the ids of each response to the own prompts, with the stop id if one was sampled:
        responses[g][row]; and the log-probability of each token under the distribution that it was
        sampled from, or None if a training forward pass gives the same.

        Args:
            prompts: The prompts of all processes, whose random numbers are the same.
            own_rows: The prompts that this process samples responses to.
        """
        model, num_generations = self.model, self.num_generations
        uniforms = torch.rand(
            len(prompts), num_generations, self.max_response_length, dtype=torch.float64
        )[list(own_rows)]
        prompts = [prompts[row] for row in own_rows]
        responses: list[list[list[int]]] = [[[]] * len(prompts) for _ in range(num_generations)]
        stops = copy_to_device(torch.tensor(self.stop_ids), model.device)
        is_captured = acceleration().cuda_graphs and can_be_captured(model)
        multiple = (FixedDecoder if is_captured else Decoder).multiple
        lengths = [len(prompt) + self.max_response_length for prompt in prompts]
        sizes = {
            row: num_generations * round_up(length, multiple)
            for row, length in sort_by_size(range(len(prompts)), lengths)
        }
        if not self.decoder:
            self.max_tokens = max_batch_tokens(model)
        batches = bucket_by_size([*sizes.items()], self.max_tokens, balanced=is_captured)
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
                for index, ids in enumerate(decoder.generate(*padded, randoms).tolist()):
                    ends = (column for column, token in enumerate(ids) if token in self.stop_ids)
                    end = next(ends, len(ids) - 1) + 1
                    responses[index % num_generations][rows[index // num_generations]] = ids[:end]
        return responses, None

    def fixed_decoder(self, stops: torch.Tensor, capacity: int) -> "FixedDecoder":
        """Return a decoder for the weights where they are now; the arguments are FixedDecoder's."""
        # Graphs read weights by their addresses, and ZeRO 3 gathers them anywhere.
        addresses = [each.data_ptr() for each in (*self.model.parameters(), *self.model.buffers())]
        if not self.decoder or self.decoder.capacity < capacity or addresses != self.addresses:
            # Free the old one first. Its graphs have ended: their tokens were read.
            self.decoder, self.addresses = None, addresses
            self.decoder = FixedDecoder(self.model, stops, self.temperature, capacity)
        return self.decoder

    def sleep(self) -> None:
        """Free memory until the next update, which has to come before the next sample."""
        buffers = self.decoder.buffers.values() if self.decoder else ()
        if sum(buffer.nbytes for buffer in buffers) > self.allowance:
            self.decoder = None

    def step_ended(self) -> None:
        """Learn that a step of the training has ended, whose peak of memory is known."""
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
    choices, device = acceleration(), model.device
    if choices.generate_tokens is not None or device.type != "cuda":
        return choices.generate_tokens or choices.micro_batch_tokens
    free, total = torch.cuda.mem_get_info(device)
    # Torch keeps memory that it does not use.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    memory = MEMORY_FRACTION * total
    if not processes.uses_deterministic_kernels():
        memory = min(memory, FREE_FRACTION * free)
    return default_generate_tokens(
        model.config, model.dtype.itemsize, choices.micro_batch_tokens, memory
    )


def cache_elements(config: PreTrainedConfig) -> int:
    """Return the number of elements of the keys and values of a token in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_size(config)


def default_generate_tokens(
    config: PreTrainedConfig, element_bytes: int, micro_batch_tokens: int, memory: float
) -> int:
    """Return the default of generate_tokens: the maximum number of tokens in a batch of responses.

    Sampling a token reads all weights once for the whole batch, so larger batches are faster.

    element_bytes: Bytes of an element of the cache. memory: Bytes that keys and values may use.
    """
    return max(micro_batch_tokens, int(memory / (element_bytes * cache_elements(config))))


# --- decoding by CUDA graphs --------------------------------------------------------------------


class FixedLayer(DynamicLayer):
    """Keys and values [b, H, L, D] of a layer, of which each token writes one column.

    All columns are returned: the mask says which ones have tokens.

    Args:
        column: [1], where the next token is written. The caller advances it.
    """

    def __init__(self, column: torch.Tensor) -> None:
        super().__init__()
        self.column = column

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of a token, and return all columns."""
        keys, values = cast(Any, self.keys), cast(Any, self.values)
        keys.index_copy_(2, self.column, key_states)
        return keys, values.index_copy_(2, self.column, value_states)

    def get_seq_length(self) -> int:
        """Return 0: the mask says which columns have tokens."""
        return 0


class FixedDecoder(Decoder):
    """A decoder with tensors of fixed addresses, and a CUDA graph of each shape of a step.

    A token of a small model takes a GPU less time than Python needs to launch its kernels: a
    captured step is launched at once. Nothing in a step may depend on the host: the column of the
    cache, the mask and the number of the token are tensors that the step advances itself.

    It serves all batches whose tokens have space: whichever shape a batch has, its tensors begin
    where the buffers begin. There is a graph for the rows of a batch, for half of them, for a
    quarter and so on; it repeats the last row as ended where the batch has fewer rows.

    Args:
        capacity: Tokens of the largest batch, padding included.
    """

    has_cache, multiple = True, LENGTH_MULTIPLE

    def __init__(
        self, model: PreTrainedModel, stops: torch.Tensor, temperature: float, capacity: int
    ) -> None:
        super().__init__(model, stops, temperature)
        self.capacity, self.cache = capacity, DynamicCache(config=model.config)
        self.cache.layers = [FixedLayer(self.column) for _ in self.cache.layers]
        # Of the state, which has the keys and values of each layer.
        self.buffers: dict[str, torch.Tensor] = {}
        # By rows and length. They share a pool of memory.
        self.graphs: dict[torch.Size, Any] = {}

    def size_for(self, num_rows: int) -> int:
        """Return the number of rows of the smallest graph that has space for some rows."""
        size = self.num_rows
        while size > SMALLEST_GRAPH and (size + 1) // 2 >= num_rows:
            size = (size + 1) // 2
        return size

    def fits_less(self, num_rows: int) -> bool:
        """Return whether there is a smaller graph for some of the rows."""
        return self.size_for(num_rows) < len(self.state["ended"])

    def start_cache(self, prompts: DynamicCache, sources: torch.Tensor) -> None:
        """Copy the keys and values of its prompt [b] to each row, and free the prompts' own."""

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            yield from self.state.items()
            for number, layer in enumerate(cast(Any, prompts.layers)):
                # Without zeros, there could be NaN, which a mask does not remove.
                padding = (0, 0, 0, self.length - layer.length)
                for name in KEYS_VALUES:
                    tensor = getattr(layer, name)[sources]
                    # Free the prompts' own.
                    delattr(layer, name)
                    yield f"{name} {number}", torch.nn.functional.pad(tensor, padding)

        self._fill(torch.arange(len(sources), device=sources.device), tensors())
        self.end = self.length

    def keep(self, rows: torch.Tensor) -> None:
        """Keep the given rows of the batch."""
        self._fill(rows, self.state.items())

    def _fill(self, rows: torch.Tensor, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy rows of the state to where the buffers begin; the last one fills a graph."""
        number, size = len(rows), self.size_for(len(rows))
        rows = torch.cat([rows, rows[-1:].expand(size - number)])
        self.state = {name: self._fixed(name, each[rows]) for name, each in tensors}
        self.state["ended"][number:] = True
        for index, layer in enumerate(cast(Any, self.cache.layers)):
            layer.keys, layer.values = (self.state[f"{name} {index}"] for name in KEYS_VALUES)

    def _fixed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the start of a buffer; return it there."""
        if name not in self.buffers:
            elements = tensor.shape[1] * tensor.shape[3] if tensor.ndim == 4 else 1
            self.buffers[name] = tensor.new_empty(self.capacity * elements)
        return self.buffers[name][: tensor.numel()].view(tensor.shape).copy_(tensor)

    def step(self) -> None:
        """Sample a token of each row, from a graph on a GPU."""
        if self.stops.is_cuda:
            self.run_graph()
        else:
            self.sample()

    def run_graph(self) -> None:
        """Run the graph of a step of this shape; the first call captures it."""
        shape = self.state["mask"].shape
        if shape in self.graphs:
            self.graphs[shape].replay()
            return
        # A first step outside of the graph: libraries allocate their workspaces. It counts.
        stream = warm_up_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.sample()
        torch.cuda.current_stream().wait_stream(stream)
        # Graphs of one decoder never run at the same time: they share the memory of their
        # intermediate results. Other threads, such as NCCL's, may use CUDA meanwhile.
        pool = next((graph.pool() for graph in self.graphs.values()), None)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                self.sample()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
            raise InputError(
                f"{describe(self.model)}: a CUDA graph of a sampled token fails ({reason}): set"
                " cuda_graphs: false in the placement"
            ) from error
        self.graphs[shape] = graph


@functools.cache
def warm_up_stream() -> torch.cuda.Stream:
    """Return the stream of all first steps: libraries keep a workspace for each stream."""
    return torch.cuda.Stream()


def can_be_captured(model: PreTrainedModel) -> bool:
    """Return whether a graph can have the passes of a model that sample tokens.

    The weights of a model whose layers are gathered at each call move. Whether the host waits
    within a pass, which ends a capture, is tried once, and a warning says so.
    """
    is_whole = all(weight.shape == whole_shape(weight) for weight in model.parameters())
    if not is_whole or not takes_dense_mask(model):
        return False
    if model not in _captures:
        problem = _capture_problem(model)
        _captures[model] = problem is None
        if problem:
            warn(f"{describe(model)}: responses are sampled without CUDA graphs: a pass {problem}")
    return _captures[model]


@torch.no_grad()
def _capture_problem(model: PreTrainedModel) -> str | None:
    """Run a step of a decoder outside of a graph; return what a graph could not have."""
    device = model.device
    stops = torch.zeros(1, dtype=torch.int64, device=device)
    decoder = FixedDecoder(model, stops, 1.0, LENGTH_MULTIPLE)
    cache, prompt = make_cache(model.config, 1), torch.ones_like(stops)[None]
    next_logits(model, cache, prompt, prompt, prompt - 1)
    tokens, uniforms = (
        torch.zeros(1, 2, dtype=d, device=device) for d in (torch.int64, torch.float64)
    )
    decoder.start(cache, prompt, stops, tokens, uniforms)
    try:
        if device.type == "cuda":
            # An operation for which the host waits for the GPU raises RuntimeError.
            torch.cuda.set_sync_debug_mode("error")
        decoder.sample()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return str(error).partition("\n")[0]
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return None
