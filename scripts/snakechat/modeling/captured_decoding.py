"""Decoding with tensors of fixed addresses, which CUDA graphs can capture.

A token of a small model takes a GPU less time than Python needs to launch its kernels: a captured
step is launched at once. Nothing in a step may depend on the host: the column of the cache, the
mask and the number of the token are tensors that the step advances itself.

Shapes: n prompts, b rows of a batch, R tokens of the longest response, L of a prompt and its
response, H heads of D dimensions.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from snakechat.modeling.decoding import Decoder, next_logits, takes_dense_mask
from snakechat.modeling.key_value_cache import PreallocatedLayer, make_cache
from snakechat.modeling.models import describe, whole_shape
from snakechat.workflow.errors import InputError, is_out_of_memory, warn

# A graph of this size or smaller is not halved. A step of a few rows takes as long as a step of one
# row: the time to read the weights.
SMALLEST_GRAPH = 8

# Whether a graph can have the pass of a model.
_captures: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


class FixedDecoder(Decoder):
    """A decoder with tensors of fixed addresses, and a CUDA graph of each shape of a step.

    It serves all batches whose tokens have space: whichever shape a batch has, its keys and values
    begin where the buffers begin. There is a graph for the rows of a batch, for half of them, for a
    quarter and so on; it repeats the last row as ended where the batch has fewer rows.

    Args:
        capacity: Tokens of the largest batch, padding included.
        max_response_length: R.
    """

    has_cache = True

    def __init__(
        self,
        model: PreTrainedModel,
        stops: torch.Tensor,
        temperature: float,
        capacity: int,
        max_response_length: int,
    ) -> None:
        super().__init__(model, stops, temperature)
        self.capacity, self.cache = capacity, DynamicCache(config=model.config)
        self.cache.layers = [FixedLayer(capacity) for _ in self.cache.layers]
        self.column = torch.zeros_like(self.number)
        self.mask = torch.zeros(capacity, dtype=torch.bool, device=stops.device)
        # Each row has space for a response.
        self.max_rows = capacity // max_response_length
        self.state = {}
        # By rows and length. The captured ones share a pool of memory.
        self.steps: dict[tuple[int, int], Callable[[], None]] = {}
        self.graphs: list[Any] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(cast(FixedLayer, layer).num_bytes for layer in self.cache.layers)

    def set_shape(self, num_rows: int, length: int) -> None:
        """Set the rows and the length of the coming batch."""
        self.num_rows, self.length = num_rows, length

    def size_for(self, num_rows: int) -> int:
        """Return the number of rows of the smallest graph that has space for some rows."""
        size = self.num_rows
        while size > SMALLEST_GRAPH and (size + 1) // 2 >= num_rows:
            size = (size + 1) // 2
        return size

    def start(
        self,
        cache: DynamicCache,
        attention_mask: torch.Tensor,
        sources: torch.Tensor,
        first: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> None:
        """Copy a batch; see run."""
        num_rows, length = len(sources), attention_mask.shape[1]
        self.size = self.size_for(num_rows)
        rows = filled(torch.arange(num_rows, device=sources.device), self.size)
        for layer, prompts in zip(self.cache.layers, cache.layers, strict=True):
            fixed = cast(FixedLayer, layer)
            fixed.start(cast(PreallocatedLayer, prompts), sources[rows], self.length, self.column)
        self.column.fill_(length)
        mask = self.mask_of(self.size)
        mask.fill_(False)
        mask[..., :length] = attention_mask.bool()[sources[rows], None, None]
        for name, tensor in self.first_state(attention_mask[sources], first, uniforms).items():
            if name not in self.state:
                self.state[name] = tensor.new_zeros(self.max_rows, *tensor.shape[1:])
            self.state[name][: self.size] = tensor[rows]
        self.state["ended"][num_rows : self.size] = True

    def mask_of(self, size: int) -> torch.Tensor:
        """Return the mask [size, 1, 1, L] of the first rows."""
        return self.mask[: size * self.length].view(size, 1, 1, self.length)

    def keep(self, rows: torch.Tensor) -> None:
        """Keep the given rows of the batch, in the first rows of the tensors."""
        num_rows, size = len(rows), self.size_for(len(rows))
        rows = filled(rows, size)
        for tensor in self.state.values():
            tensor[:size] = tensor[rows]
        self.mask_of(size).copy_(self.mask_of(self.size)[rows])
        self.state["ended"][num_rows:size] = True
        self.cache.reorder_cache(cast(torch.LongTensor, rows))
        self.size = size

    def step(self) -> None:
        """Sample a token of each row, from a graph if a GPU can have one."""
        shape = self.size, self.length
        if shape not in self.steps:
            # A closure over the decoder would keep its cache and graphs until Python looks for
            # cycles, which may be many decoders later.
            decoder = weakref.proxy(self)

            def step() -> None:
                decoder.sample_fixed()

            self.steps[shape] = self._captured(step) if self.stops.is_cuda else step
        self.steps[shape]()

    def sample_fixed(self) -> None:
        """Sample a token of each row, without any number of the host."""
        mask = self.mask_of(self.size)
        mask.index_fill_(3, self.column, True)
        self.sample({name: tensor[: self.size] for name, tensor in self.state.items()}, mask)
        self.column += 1

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


def filled(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Return indices [size] of rows [b], the last of which fills the rest."""
    return torch.cat([rows, rows[-1:].expand(size - len(rows))])


class FixedLayer(DynamicLayer):
    """Keys and values [b, H, L, D] of a layer at addresses that all batches share.

    Each token is written to a column, and the columns of all tokens are returned: the caller masks
    those that have none yet.

    Args:
        capacity: b * L of the largest batch.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.buffers: list[torch.Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers or ())

    def start(
        self,
        prompts: PreallocatedLayer,
        sources: torch.Tensor,
        length: int,
        column: torch.Tensor,
    ) -> None:
        """Start a batch from the keys and values of its prompts, which are freed.

        Args:
            sources: [b], the row in `prompts` of each row.
            length: L of the batch.
            column: [1], where the next token is written. The caller advances it.
        """
        assert prompts.buffers is not None
        if self.buffers is None:
            # Uninitialized memory may contain NaN, which a mask does not remove.
            self.shapes = [(new.shape[1], new.shape[3]) for new in prompts.buffers]
            self.buffers = [
                new.new_zeros(self.capacity * heads * dimensions)
                for new, (heads, dimensions) in zip(prompts.buffers, self.shapes, strict=True)
            ]
        self.num_rows, self.length, self.column = len(sources), length, column
        for states, new in zip(self.states(), prompts.buffers, strict=True):
            states[:, :, : prompts.length] = new[sources, :, : prompts.length]
        prompts.buffers = None

    def states(self) -> list[torch.Tensor]:
        """Return the keys and the values of the batch."""
        assert self.buffers is not None
        return [
            buffer[: self.num_rows * heads * self.length * dimensions].view(
                self.num_rows, heads, self.length, dimensions
            )
            for buffer, (heads, dimensions) in zip(self.buffers, self.shapes, strict=True)
        ]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of a token, and return all columns."""
        keys, values = (
            states.index_copy_(2, self.column, new)
            for states, new in zip(self.states(), (key_states, value_states), strict=True)
        )
        return keys, values

    def get_seq_length(self) -> int:
        """Return 0: the mask says which columns have tokens."""
        return 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Select rows of the batch, which then has as many."""
        selected = [states[beam_idx] for states in self.states()]
        self.num_rows = len(beam_idx)
        for states, new in zip(self.states(), selected, strict=True):
            states.copy_(new)


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
    decoder = FixedDecoder(model, stops, 1.0, 4, 2)
    decoder.set_shape(1, 4)
    cache, prompt = make_cache(model.config, 1), torch.ones_like(stops)[None]
    next_logits(model, cache, prompt, prompt, prompt - 1)
    uniforms = torch.zeros(1, 2, dtype=torch.float64, device=device)
    decoder.start(cache, prompt, stops, stops, uniforms)
    try:
        with forbidden_waits(device):
            decoder.sample_fixed()
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
