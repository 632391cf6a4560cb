"""Decoding: the tokens of a batch of responses, sampled one after the other with a key-value cache.

A token of a small model takes a GPU less time than Python needs to launch its kernels. If nothing
in a step depends on the host, a CUDA graph can have it: the column of the cache, the mask and the
number of the token are then tensors of fixed addresses, which the step advances itself.

Shapes: n prompts, G responses of each; b rows of a batch, c tokens of each; R tokens of the longest
response, T of the longest prompt, L of a prompt and its response; V entries of the vocabulary.
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from snakechat.modeling import acceleration
from snakechat.modeling.acceleration import copy_to_device
from snakechat.modeling.key_value_cache import (
    FixedLayer,
    PreallocatedLayer,
    make_cache,
    make_fixed_cache,
)
from snakechat.modeling.models import describe, supports_packing, whole_shape
from snakechat.workflow.errors import InputError, is_out_of_memory, warn

# Ended rows leave a batch once at most this fraction of its rows is unfinished.
COMPACTION_THRESHOLD = 7 / 8
# A graph of this size or smaller is not halved. A step of a few rows takes as long as a step of one
# row: the time to read the weights.
SMALLEST_GRAPH = 8
# Probabilities that are summed at a time to sample a token.
CDF_BLOCK = 64
# The largest weight of a distribution as an integer. The sum of 32,768 of them fits 64 bits.
LARGEST_WEIGHT = 2**48

# Whether a graph can have the pass of a model.
_captures: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


def generate_batch(
    decoder: "Decoder",
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """Generate responses [n * G, R] to left-padded prompts [n, T], those of a prompt adjacent.

    Args:
        input_ids, attention_mask: [n, T].
        uniforms: [n, G, R] in [0, 1), the only source of randomness.

    Returns:
        Token ids, filled with a stop id after the end of a response.
    """
    stops, copies, uniforms = decoder.stops, uniforms.shape[1], uniforms.flatten(end_dim=1)
    # A FixedDecoder has a cache of its own for the responses.
    num_tokens = 0 if isinstance(decoder, FixedDecoder) else uniforms.shape[1]
    cache = make_cache(decoder.model.config, input_ids.shape[1] + num_tokens)
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    logits = next_logits(decoder.model, cache, input_ids, attention_mask, positions)
    first = sample_tokens(logits, uniforms[:, 0].view(-1, copies), decoder.temperature).flatten()
    tokens = stops[0].expand_as(uniforms).clone()
    tokens[:, 0] = first
    ended = torch.isin(first, stops)
    if count_unfinished(ended, all_finite(logits)):
        kept = (~ended).nonzero().squeeze(1)
        tokens[kept] = decoder.run(
            cache, attention_mask, kept // copies, first[kept], uniforms[kept]
        )
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
    """Pad sequences on the left. Returns input_ids and attention_mask, [n, T] each.

    The mask follows from the lengths, so pad_id may be any id.
    """
    longest = max(len(sequence) for sequence in sequences)
    input_ids = torch.full((len(sequences), longest), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, sequence in enumerate(sequences):
        input_ids[row, longest - len(sequence) :] = torch.as_tensor(np.asarray(sequence, np.int64))
        attention_mask[row, longest - len(sequence) :] = 1
    return copy_to_device(input_ids, device), copy_to_device(attention_mask, device)


def takes_dense_mask(model: PreTrainedModel) -> bool:
    """Return whether a model takes a mask [b, 1, 1, L] of a token, and its cache keeps all tokens.

    From a mask [b, L], transformers makes that one at each token, and reads it on the host first.
    """
    layers = make_cache(model.config, 1).layers
    return all(isinstance(layer, PreallocatedLayer) for layer in layers) and supports_packing(model)


def count_unfinished(ended: torch.Tensor, is_finite: torch.Tensor) -> int:
    """Return the number of rows that have not ended. Waits for the device.

    Args:
        ended: bool [b]. is_finite: bool, whether all logits of the last tokens are finite.

    Raises:
        InputError: They are not.
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
    """Samples the tokens of a batch whose first tokens another pass has sampled.

    Args:
        stops: Ids that end a response.
        temperature: 0 selects the most likely token.

    Attributes:
        size: Rows of the batch. Those that have ended leave it when others remain.
        state: Tensors of the rows.
        number: The number of the next token [1], the same in all rows.
    """

    def __init__(self, model: PreTrainedModel, stops: torch.Tensor, temperature: float) -> None:
        self.model, self.stops, self.temperature = model, stops, temperature
        self.stop_check_steps = acceleration.current().stop_check_steps
        self.takes_dense_mask = takes_dense_mask(model)
        self.number = torch.ones(1, dtype=torch.int64, device=stops.device)
        self.is_finite = torch.ones((), dtype=torch.bool, device=stops.device)

    def run(
        self,
        cache: DynamicCache,
        attention_mask: torch.Tensor,
        sources: torch.Tensor,
        first: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> torch.Tensor:
        """Sample until all rows have ended.

        Args:
            cache: Keys and values of the prompts.
            attention_mask: [n, T], 0 for padding on the left.
            sources: [b], the prompt of each row.
            first: [b], the first token of each response, none of which ends it.
            uniforms: [b, R], the random numbers of all tokens.

        Returns:
            All tokens [b, R] of the responses, filled with a stop id after their ends.
        """
        self.start(cache, attention_mask, sources, first, uniforms)
        tokens = self.stops[0].expand_as(uniforms).clone()
        tokens[:, 0] = first
        rows = torch.arange(len(tokens), device=tokens.device)
        number, limit = 1, tokens.shape[1]
        while number < limit:
            for _ in range(min(self.stop_check_steps, limit - number)):
                self.step()
                number += 1
            num_unfinished = count_unfinished(self.state["ended"][: self.size], self.is_finite)
            if number < limit and num_unfinished and self.size_for(num_unfinished) == self.size:
                continue
            tokens[rows] = self.state["tokens"][: len(rows)]
            if num_unfinished == 0:
                break
            kept = (~self.state["ended"][: len(rows)]).nonzero().squeeze(1)
            rows = rows[kept]
            self.keep(kept)
        return tokens

    def start(
        self,
        cache: DynamicCache,
        attention_mask: torch.Tensor,
        sources: torch.Tensor,
        first: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> None:
        """Start a batch; see run."""
        self.cache, self.size, self.end = cache, len(sources), attention_mask.shape[1]
        cache.reorder_cache(cast(torch.LongTensor, sources))
        new_mask = attention_mask.new_ones(uniforms.shape)
        self.mask = torch.cat([attention_mask[sources], new_mask], dim=1)
        self.state = self.first_state(attention_mask[sources], first, uniforms)

    def first_state(
        self, attention_mask: torch.Tensor, first: torch.Tensor, uniforms: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of rows after their first tokens, with the prompt's mask of each."""
        self.number.fill_(1)
        self.is_finite.fill_(True)
        tokens = self.stops[0].expand_as(uniforms).clone()
        tokens[:, 0] = first
        return {
            "input_ids": first[:, None],
            "positions": attention_mask.sum(dim=1, keepdim=True),
            "ended": torch.zeros_like(first, dtype=torch.bool),
            "uniforms": uniforms,
            "tokens": tokens,
        }

    def size_for(self, num_rows: int) -> int:
        """Return the size of the batch for some of its rows."""
        return num_rows if num_rows <= COMPACTION_THRESHOLD * self.size else self.size

    def keep(self, rows: torch.Tensor) -> None:
        """Keep the given rows of the batch."""
        self.state = {name: tensor[rows] for name, tensor in self.state.items()}
        self.mask = self.mask[rows]
        self.cache.reorder_cache(cast(torch.LongTensor, rows))
        self.size = len(rows)

    def step(self) -> None:
        """Sample a token of each row."""
        self.end += 1
        mask = self.mask[:, : self.end]
        if self.takes_dense_mask:
            mask = mask.bool()[:, None, None]
        self.sample(self.state, mask)

    def sample(self, state: dict[str, torch.Tensor], mask: torch.Tensor) -> None:
        """Sample a token of each row of a state."""
        inputs = state["input_ids"], mask, state["positions"]
        logits = next_logits(self.model, self.cache, *inputs)
        uniforms = state["uniforms"].index_select(1, self.number)
        sampled = sample_tokens(logits, uniforms, self.temperature)
        sampled = torch.where(state["ended"][:, None], self.stops[0], sampled)
        state["tokens"].index_copy_(1, self.number, sampled)
        state["ended"] |= (sampled == self.stops).any(dim=1)
        self.is_finite &= all_finite(logits)
        state["input_ids"].copy_(sampled)
        state["positions"] += 1
        self.number += 1


class FixedDecoder(Decoder):
    """A decoder with tensors of fixed addresses, and a CUDA graph of each shape of a step.

    It serves all batches whose tokens have space: whichever shape a batch has, its keys and values
    begin where the buffers begin. There is a graph for the rows of a batch, for half of them, for a
    quarter and so on; it repeats the last row as ended where the batch has fewer rows.

    Args:
        capacity: Tokens of the largest batch, padding included.
        max_response_length: R.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stops: torch.Tensor,
        temperature: float,
        capacity: int,
        max_response_length: int,
    ) -> None:
        super().__init__(model, stops, temperature)
        self.capacity, self.cache = capacity, make_fixed_cache(model.config, capacity)
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
    probabilities = functional.pad(probabilities, (0, -probabilities.shape[1] % CDF_BLOCK))
    blocks = probabilities.view(len(logits), -1, CDF_BLOCK)
    block, uniforms = invert_cdf(blocks.sum(dim=2), uniforms)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    column, _ = invert_cdf(blocks[rows, block], uniforms[..., None])
    tokens = block * CDF_BLOCK + column.squeeze(-1)
    # Logits that are not finite give any token, and callers check them later. On a GPU, an index
    # outside of the vocabulary would end the process before.
    return tokens.clamp(max=logits.shape[1] - 1)


def invert_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the entries at which the normalized cumulative sum exceeds each uniform number.

    Args:
        weights: [..., m], not normalized.
        uniforms: [..., c] in [0, 1).

    Returns:
        Indices [..., c] of the entries, any ones if a weight is not finite; and the fraction
        [..., c] of each entry's weight that lies below its uniform number.
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
