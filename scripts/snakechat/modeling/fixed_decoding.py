"""Decoding with tensors of fixed shapes, which a CUDA graph can capture.

A token of a small model takes a GPU less time than Python needs to launch its kernels: a captured
step is launched at once. Nothing in a step may depend on the host: the column of the cache, the
mask and the number of the token are tensors that the step advances itself.

Shapes: n rows of a batch, b rows of a decoder, R tokens of the longest response, L tokens of prompt
and response.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import DynamicCache, PreTrainedModel

from snakechat.modeling.key_value_cache import PreallocatedLayer, make_cache
from snakechat.modeling.models import supports_packing
from snakechat.modeling.partitions import whole_shape
from snakechat.modeling.token_sampling import sample_tokens
from snakechat.workflow.errors import InputError

# A graph of this size or smaller is not halved. A step of a few rows takes as long as a step of one
# row: the time to read the weights.
SMALLEST_GRAPH = 8


def takes_dense_mask(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Return whether a model takes a mask [b, 1, 1, L] of a token, and its cache keeps all tokens.

    From a mask [b, L], transformers makes that one at each token, and reads it on the host first.
    """
    keeps_all = all(isinstance(layer, PreallocatedLayer) for layer in cache.layers)
    return keeps_all and supports_packing(model)


def can_be_captured(model: PreTrainedModel) -> bool:
    """Return whether a graph can have the passes of a model that sample tokens.

    The weights of a model whose layers are gathered at each call move.
    """
    is_whole = all(weight.shape == whole_shape(weight) for weight in model.parameters())
    return is_whole and takes_dense_mask(model, make_cache(model.config, 1))


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


class FixedDecoder:
    """Samples the tokens of batches whose first tokens another pass has sampled.

    Its tensors and the graphs of its steps serve all batches. There is a graph for b rows, for half
    of them, for a quarter and so on. Rows that have ended leave the batch when a smaller graph has
    space for the others. A graph with more rows than the batch repeats its last row as ended.

    Args:
        num_rows: b, the largest number of rows of a batch.
        max_length: L, of the longest prompt and its response.
        max_response_length: R.
        stops: ids that end a response.
        temperature: 0 selects the most likely token.
        stop_check_steps: Tokens between two checks of whether responses have ended.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_rows: int,
        max_length: int,
        max_response_length: int,
        stops: torch.Tensor,
        temperature: float,
        stop_check_steps: int,
    ) -> None:
        self.model, self.num_rows, self.max_length = model, num_rows, max_length
        self.stops, self.temperature = stops, temperature
        self.stop_check_steps = stop_check_steps
        self.cache = make_cache(model.config, max_length)
        device, shape = stops.device, (num_rows, max_response_length)
        # The number and the column of the next token, the same in all rows.
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self.column = torch.zeros_like(self.number)
        self.is_finite = torch.ones((), dtype=torch.bool, device=device)
        self.state = {
            "input_ids": torch.zeros(num_rows, 1, dtype=torch.int64, device=device),
            "positions": torch.zeros(num_rows, 1, dtype=torch.int64, device=device),
            "ended": torch.zeros(num_rows, dtype=torch.bool, device=device),
            "mask": torch.zeros(num_rows, 1, 1, max_length, dtype=torch.bool, device=device),
            "uniforms": torch.zeros(shape, dtype=torch.float64, device=device),
            "tokens": torch.zeros(shape, dtype=torch.int64, device=device),
        }
        self.steps: dict[int, Callable[[], None]] = {}
        # The captured ones, which share a pool of memory.
        self.graphs: list[Any] = []

    def fits(self, num_rows: int, max_length: int) -> bool:
        """Return whether this decoder has the length of a batch, and space for its rows."""
        return num_rows <= self.num_rows and max_length == self.max_length

    def run(
        self,
        cache: DynamicCache,
        attention_mask: torch.Tensor,
        sources: torch.Tensor,
        sampled: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> torch.Tensor:
        """Sample until all rows have ended.

        Args:
            cache: Keys and values of the prompts.
            attention_mask: [prompts, T], 0 for padding on the left.
            sources: [n], the prompt of each row.
            sampled: [n], the first token of each response, none of which ends it.
            uniforms: [n, R], the random numbers of all tokens.

        Returns:
            All tokens [n, R] of the responses, filled with a stop id after their ends.
        """
        size = self._size(len(sources))
        self._start(cache, attention_mask, sources, sampled, uniforms, size)
        tokens = self.stops[0].expand_as(uniforms).clone()
        rows = torch.arange(len(tokens), device=tokens.device)
        number, limit = 1, tokens.shape[1]
        while number < limit:
            step = self._step_of(size)
            for _ in range(min(self.stop_check_steps, limit - number)):
                step()
                number += 1
            # Waits for the device.
            num_unfinished = count_unfinished(self.state["ended"][:size], self.is_finite)
            if number < limit and num_unfinished and self._size(num_unfinished) == size:
                continue
            tokens[rows] = self.state["tokens"][: len(rows)]
            if num_unfinished == 0:
                break
            kept = (~self.state["ended"][: len(rows)]).nonzero().squeeze(1)
            rows, size = rows[kept], self._size(len(kept))
            self._keep(kept, size)
        return tokens

    def _size(self, num_rows: int) -> int:
        """Return the number of rows of the smallest graph that has space for some rows."""
        size = self.num_rows
        while size > SMALLEST_GRAPH and (size + 1) // 2 >= num_rows:
            size = (size + 1) // 2
        return size

    def _start(
        self,
        cache: DynamicCache,
        attention_mask: torch.Tensor,
        sources: torch.Tensor,
        sampled: torch.Tensor,
        uniforms: torch.Tensor,
        size: int,
    ) -> None:
        """Copy a batch; see run."""
        rows = filled(torch.arange(len(sources), device=sources.device), size)
        sources, length = sources[rows], attention_mask.shape[1]
        state = {name: tensor[:size] for name, tensor in self.state.items()}
        state["input_ids"].copy_(sampled[rows, None])
        state["positions"].copy_(attention_mask.sum(dim=1)[sources, None])
        state["ended"].fill_(False)
        state["ended"][len(sampled) :] = True
        state["mask"].fill_(False)
        state["mask"][..., :length] = attention_mask.bool()[sources, None, None]
        state["uniforms"].copy_(uniforms[rows])
        state["tokens"].fill_(self.stops[0])
        state["tokens"][:, 0] = sampled[rows]
        self.number.fill_(1)
        self.column.fill_(length)
        self.is_finite.fill_(True)
        for layer, prompts in zip(self.cache.layers, cache.layers, strict=True):
            cast(PreallocatedLayer, layer).fix(
                cast(PreallocatedLayer, prompts), sources, self.num_rows, self.column
            )

    def _keep(self, rows: torch.Tensor, size: int) -> None:
        """Keep the given rows of the batch, in the first rows of the tensors."""
        num_rows, rows = len(rows), filled(rows, size)
        for tensor in self.state.values():
            tensor[:size] = tensor[rows]
        self.state["ended"][num_rows:size] = True
        self.cache.reorder_cache(cast(torch.LongTensor, rows))

    def _step_of(self, size: int) -> Callable[[], None]:
        """Return the function that samples a token of each of the first rows."""
        for layer in self.cache.layers:
            cast(PreallocatedLayer, layer).num_rows = size
        if size not in self.steps:
            # A closure over the decoder would keep its cache and graphs until Python looks for
            # cycles, which may be many decoders later.
            decoder = weakref.proxy(self)

            def step() -> None:
                decoder.step(size)

            self.steps[size] = self._captured(step) if self.stops.is_cuda else step
        return self.steps[size]

    def _captured(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return a function that runs a step from a CUDA graph; the first call captures it."""
        graph, graphs = torch.cuda.CUDAGraph(), self.graphs

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
            with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                step()
            graphs.append(graph)

        return run

    def step(self, size: int) -> None:
        """Sample a token of each of the first rows."""
        state = {name: tensor[:size] for name, tensor in self.state.items()}
        state["mask"].index_fill_(3, self.column, True)
        logits = self.model(
            input_ids=state["input_ids"],
            attention_mask=state["mask"],
            position_ids=state["positions"],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        uniforms = state["uniforms"].index_select(1, self.number)
        sampled = sample_tokens(logits, uniforms, self.temperature)
        sampled = torch.where(state["ended"][:, None], self.stops[0], sampled)
        state["tokens"].index_copy_(1, self.number, sampled)
        state["ended"] |= (sampled == self.stops).any(dim=1)
        self.is_finite &= all_finite(logits)
        state["input_ids"].copy_(sampled)
        for counter in (state["positions"], self.column, self.number):
            counter += 1


@functools.cache
def warm_up_stream() -> torch.cuda.Stream:
    """Return the stream of all first steps: libraries keep a workspace for each stream."""
    return torch.cuda.Stream()


def filled(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Return indices [size] of rows [n], the last of which fills the rest."""
    return torch.cat([rows, rows[-1:].expand(size - len(rows))])
