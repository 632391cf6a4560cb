"""Decoding with tensors of fixed addresses, which CUDA graphs can capture.

A token of a small model takes a GPU less time than Python needs to launch its kernels: a captured
step is launched at once. Nothing in a step may depend on the host: the column of the cache, the
mask and the number of the token are tensors that the step advances itself.

Shapes: as in decoding.py.
"""

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from snakechat.modeling.decoding import (
    Decoder,
    PreallocatedLayer,
    make_cache,
    next_logits,
    takes_dense_mask,
)
from snakechat.modeling.models import describe, whole_shape
from snakechat.workflow.errors import InputError, is_out_of_memory, warn

# A graph of this size or smaller is not halved. A step of a few rows takes as long as a step of one
# row: the time to read the weights.
SMALLEST_GRAPH = 8
# Lengths of a FixedDecoder are multiples of this number, so that a graph serves several batches.
LENGTH_MULTIPLE = 64

# Whether a graph can have the pass of a model.
_captures: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


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


class FixedDecoder(Decoder):
    """A decoder with tensors of fixed addresses, and a CUDA graph of each shape of a step.

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
        self.cache.layers = [FixedLayer(capacity, self.column) for _ in self.cache.layers]
        self.buffers: dict[str, torch.Tensor] = {}
        # By rows and length. The captured ones share a pool of memory.
        self.steps: dict[torch.Size, Callable[[], None]] = {}
        self.graphs: list[Any] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(cast(FixedLayer, layer).num_bytes for layer in self.cache.layers)

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
        """Copy the keys and values of the prompt [b] of each row."""
        rows = self._select(torch.arange(len(sources), device=sources.device))
        for layer, of_prompts in zip(self.cache.layers, prompts.layers, strict=True):
            fixed = cast(FixedLayer, layer)
            fixed.start(cast(PreallocatedLayer, of_prompts), sources[rows], self.length)
        self.end = self.length

    def keep(self, rows: torch.Tensor) -> None:
        """Keep the given rows of the batch."""
        self.cache.reorder_cache(cast(torch.LongTensor, self._select(rows)))

    def _select(self, rows: torch.Tensor) -> torch.Tensor:
        """Copy rows of the state to the buffers; return them, the last of which fills a graph."""
        number, size = len(rows), self.size_for(len(rows))
        rows = torch.cat([rows, rows[-1:].expand(size - number)])
        for name, tensor in self.state.items():
            if name not in self.buffers:
                self.buffers[name] = tensor.new_zeros(self.capacity)
            self.state[name] = copy_to_start(self.buffers[name], tensor[rows])
        self.state["ended"][number:] = True
        return rows

    def step(self) -> None:
        """Sample a token of each row, from a graph if a GPU can have one."""
        shape = self.state["mask"].shape
        if shape not in self.steps:
            # A closure over the decoder would keep its cache and graphs until Python looks for
            # cycles, which may be many decoders later.
            decoder = weakref.proxy(self)

            def step() -> None:
                decoder.sample()

            self.steps[shape] = self._captured(step) if self.stops.is_cuda else step
        self.steps[shape]()

    def _captured(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return a function that runs a step from a CUDA graph; the first call captures it."""
        graph, graphs, name = torch.cuda.CUDAGraph(), self.graphs, describe(self.model)

        def run() -> None:
            if graph in graphs:
                graph.replay()
                return
            # A first step outside of the graph: libraries allocate their workspaces. It counts.
            stream = warm_up_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()
            torch.cuda.current_stream().wait_stream(stream)
            # Graphs of one decoder never run at the same time: they share the memory of their
            # intermediate results. Other threads, such as NCCL's, may use CUDA meanwhile.
            pool = graphs[0].pool() if graphs else None
            try:
                with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                    step()
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0]
                raise InputError(
                    f"{name}: a CUDA graph of a sampled token fails ({reason}): set cuda_graphs:"
                    " false in the placement"
                ) from error
            graphs.append(graph)

        return run


@functools.cache
def warm_up_stream() -> torch.cuda.Stream:
    """Return the stream of all first steps: libraries keep a workspace for each stream."""
    return torch.cuda.Stream()


# --- what can be captured -----------------------------------------------------------------------


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
        with forbidden_waits(device):
            decoder.sample()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return str(error).partition("\n")[0]
    return None


@contextlib.contextmanager
def forbidden_waits(device: torch.device) -> Iterator[None]:
    """Context in which an operation for which the host waits for a GPU raises RuntimeError."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
