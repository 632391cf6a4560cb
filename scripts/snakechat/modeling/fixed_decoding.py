"""Decoding with tensors of fixed shapes, which a CUDA graph can capture.

A token of a small model takes a GPU less time than Python needs to launch its kernels: a captured
step is launched at once. Nothing in a step may depend on the host: the column of the cache, the
mask and the number of the token are tensors that the step advances itself.

Shapes: b rows of a batch, R tokens of the longest response, L tokens of prompt and response.
"""

from collections.abc import Callable
from typing import cast

import torch
from transformers import DynamicCache, PreTrainedModel

from snakechat.modeling.key_value_cache import PreallocatedLayer
from snakechat.modeling.models import supports_packing
from snakechat.modeling.partitions import whole_shape
from snakechat.modeling.token_sampling import sample_tokens
from snakechat.workflow.errors import InputError

# Ended rows leave the batch once at most this fraction of it is unfinished: the step must then be
# captured again, which takes as long as a few steps.
COMPACTION_THRESHOLD = 1 / 2


def takes_dense_mask(model: PreTrainedModel, cache: DynamicCache) -> bool:
    """Return whether a model takes a mask [b, 1, 1, L] of a token, and its cache keeps all tokens.

    From a mask [b, L], transformers makes that one at each token, and reads it on the host first.
    """
    keeps_all = all(isinstance(layer, PreallocatedLayer) for layer in cache.layers)
    return keeps_all and supports_packing(model)


def can_be_captured(model: PreTrainedModel) -> bool:
    """Return whether a graph can have the passes of a model.

    The weights of a model whose layers are gathered at each call move.
    """
    return all(weight.shape == whole_shape(weight) for weight in model.parameters())


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
    """Samples the remaining tokens of a batch whose first ones are in a cache.

    Args:
        cache: with the keys and values of `column` tokens in each row.
        attention_mask: [b, L], 0 for padding on the left.
        positions: [b, L], of each token.
        sampled: [b], the first token of each response, which is in column `column`.
        ended: bool [b], whether each row has ended.
        uniforms: [b, R], the random numbers of all tokens.
        stops: ids that end a response.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: DynamicCache,
        attention_mask: torch.Tensor,
        positions: torch.Tensor,
        column: int,
        sampled: torch.Tensor,
        ended: torch.Tensor,
        uniforms: torch.Tensor,
        stops: torch.Tensor,
        temperature: float,
    ) -> None:
        self.model, self.cache, self.temperature = model, cache, temperature
        self.stops, self.uniforms = stops, uniforms
        self.num_sampled = 1
        self.input_ids = sampled[:, None].clone()
        self.ended = ended.clone()
        self.is_finite = torch.ones_like(ended[0])
        self.positions = positions[:, column : column + 1].clone()
        self.mask = attention_mask.bool()[:, None, None].clone()
        # Later columns of the cache are empty.
        self.mask[..., column:] = False
        self.column = torch.tensor([column], device=sampled.device)
        self.number = torch.ones_like(self.column)
        self.tokens = stops[0].expand_as(uniforms).clone()
        self.tokens[:, 0] = sampled
        for layer in cache.layers:
            cast(PreallocatedLayer, layer).fix(self.column)

    def run(self, stop_check_steps: int) -> torch.Tensor:
        """Sample until all rows have ended; return all tokens [b, R] of the responses."""
        tokens = self.tokens.clone()
        rows = torch.arange(len(tokens), device=tokens.device)
        limit = tokens.shape[1]
        while self.num_sampled < limit:
            step = self._captured() if tokens.is_cuda else self.step
            num_rows = len(self.input_ids)
            num_unfinished = num_rows
            while self.num_sampled < limit and num_unfinished > COMPACTION_THRESHOLD * num_rows:
                for _ in range(min(stop_check_steps, limit - self.num_sampled)):
                    step()
                    self.num_sampled += 1
                # Waits for the device.
                num_unfinished = count_unfinished(self.ended, self.is_finite)
            tokens[rows] = self.tokens
            if num_unfinished == 0:
                break
            kept = (~self.ended).nonzero().squeeze(1)
            rows = rows[kept]
            self._keep(kept)
        return tokens

    def step(self) -> None:
        """Sample a token of each row."""
        self.mask.index_fill_(3, self.column, True)
        logits = self.model(
            input_ids=self.input_ids,
            attention_mask=self.mask,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        uniforms = self.uniforms.index_select(1, self.number)
        sampled = sample_tokens(logits, uniforms, self.temperature)
        sampled = torch.where(self.ended[:, None], self.stops[0], sampled)
        self.tokens.index_copy_(1, self.number, sampled)
        self.ended |= (sampled == self.stops).any(dim=1)
        self.is_finite &= all_finite(logits)
        self.input_ids.copy_(sampled)
        for counter in (self.positions, self.column, self.number):
            counter += 1

    def _captured(self) -> Callable[[], None]:
        """Return a function that runs a step from a CUDA graph; the first call captures it."""
        replay: list[Callable[[], None]] = []

        def step() -> None:
            if replay:
                replay[0]()
                return
            # A first step outside of the graph: libraries allocate their workspaces. It counts.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step()
            replay.append(graph.replay)

        return step

    def _keep(self, rows: torch.Tensor) -> None:
        """Keep the given rows of the batch."""
        self.cache.reorder_cache(cast(torch.LongTensor, rows))
        for name in ("input_ids", "ended", "positions", "mask", "uniforms", "tokens"):
            setattr(self, name, getattr(self, name)[rows])
