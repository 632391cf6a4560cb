"""Attention of packed sequences: which positions see which, by a dense mask or without one.

A token sees earlier tokens of its row that belong to the prompt or to its own response. A dense
mask says so for any model, but it has B * T * T elements, and kernels compute every block of it: of
eight responses to a prompt, most blocks are pairs of different responses. Two kernels need no mask:

- Rows of one response are causal segments of the flattened positions: varlen_attn (FlashAttention).
- Responses that share a prompt: each part (a prompt, a response) attends to itself, all responses
  of a row attend to its prompt, and both are merged by their log-sum-exp, forward and backward, as
  ring attention does (Liu et al. 2023, "Ring attention with blockwise transformers").

transformers calls kernels by name (AttentionInterface). Models keep the name "sdpa", as they also
sample: a function of that name chooses the kernel by its arguments. It is not registered before a
batch needs it, so that the default path consists of transformers' functions alone.

Shapes: B packed sequences of T positions; H heads of D dimensions, maybe fewer of keys and values;
P positions of some sequences in one dimension.
"""

import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise, starmap
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from snakechat.modeling.models import acceleration

# The first GPUs with FlashAttention: Ampere.
MIN_CAPABILITY = (8, 0)
# Dimensions of a head that FlashAttention takes: multiples up to a limit.
HEAD_MULTIPLE, MAX_HEAD = 8, 256
# torch 2.11 has no argument for it: there, varlen_attn always takes fewer heads of keys and values.
HAS_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
VARLEN_GQA: dict[str, Any] = {"enable_gqa": True} if HAS_ENABLE_GQA else {}


class Spans(NamedTuple):
    """Consecutive positions: segments, or the prompts or all responses of each row.

    bounds: int32 [number + 1], where each begins and ends.
    longest: Positions of the longest one.
    places: [P], where the positions are in the flattened [B * T] ones; None: they are all of them.
    """

    bounds: Tensor
    longest: int
    places: Tensor | None = None


class Segments(NamedTuple):
    """What masks and kernels need to know of packed sequences.

    row_ids: [B, T], the number of a token's row in its packed sequence, 0 for padding.
    segment_ids: [B, T], 0 for a prompt, k for the k-th response.
    own: Rows (of one response), or prompts and responses. Padding is a segment of its own.
    prompts, responses: Of each row; None if rows have one response.
    mean_response: Mean tokens of a response, 0 if rows have one response.
    """

    row_ids: Tensor
    segment_ids: Tensor
    own: Spans
    prompts: Spans | None = None
    responses: Spans | None = None
    mean_response: float = 0.0


def make_segments(
    row_ids: np.ndarray, segment_ids: np.ndarray, to_device: Callable[[np.ndarray], Tensor]
) -> Segments:
    """Return the segments of packed sequences; see Segments for the first two arguments."""
    last_segment = segment_ids.max()
    shares_prompts = last_segment > 1
    parts = row_ids * (last_segment + 1) + segment_ids if shares_prompts else row_ids
    starts = np.flatnonzero(np.diff(parts, axis=1, prepend=-1))
    bounds = np.append(starts, row_ids.size).astype(np.int32)
    own = Spans(to_device(bounds), int(np.diff(bounds).max()))
    segments = Segments(to_device(row_ids), to_device(segment_ids), own)
    if not shares_prompts:
        return segments
    rows = np.cumsum(np.diff(row_ids, axis=1, prepend=-1) != 0).reshape(row_ids.shape) - 1
    of_responses = segment_ids > 0

    def spans(chosen: np.ndarray) -> Spans:
        lengths = np.bincount(rows[chosen], minlength=rows.max() + 1)
        ends = np.append(0, lengths.cumsum()).astype(np.int32)
        return Spans(to_device(ends), int(lengths.max()), to_device(np.flatnonzero(chosen)))

    return segments._replace(
        prompts=spans((row_ids > 0) & ~of_responses),
        responses=spans(of_responses),
        mean_response=of_responses.sum() / of_responses.flat[starts].sum(),
    )


def packed_attention_mask(row_ids: Tensor, segment_ids: Tensor) -> Tensor:
    """Return the block-causal mask [B, 1, T, T]: True where a token attends to another."""
    width = row_ids.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=row_ids.device).tril()
    same_row = (row_ids[:, :, None] == row_ids[:, None, :]) & causal
    attended = segment_ids[:, None, :]
    # Padding attends to earlier padding: the softmax over no position at all is not defined.
    return (same_row & ((attended == 0) | (segment_ids[:, :, None] == attended)))[:, None]


def layer_masks(
    config: PreTrainedConfig, mask: Tensor, position_ids: Tensor
) -> Tensor | dict[str, Tensor]:
    """Return the mask as a model takes it: one by layer type if its layers differ.

    A mask that is given to a model replaces its own mask, so this applies its sliding window: no
    token sees those that lie so many or more positions back. Positions count, not columns: between
    the second response of a row and its prompt lies the first one.

    mask: bool [B, 1, T, T]. position_ids: [B, T].
    """
    window = getattr(config, "sliding_window", None)
    # Some families have a window of 0 for none.
    if not window:
        return mask
    # Compared without their differences, which would take eight times the memory of the mask.
    local = mask & (position_ids[:, None, :] > position_ids[:, :, None] - window)[:, None]
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        return {"full_attention": mask, "sliding_attention": local}
    return local


def packed_arguments(
    model: PreTrainedModel, segments: Segments, position_ids: Tensor
) -> dict[str, Any]:
    """Return the arguments of a model's forward pass that separate the rows of packed sequences."""
    if not needs_dense_mask(model, segments):
        AttentionInterface.register("sdpa", packed_attention)
        # A mask of four dimensions keeps models from building one; nothing reads it.
        return {
            "attention_mask": segments.row_ids.new_empty(0, 0, 0, 0),
            # Compiled layers would be compiled again for each number.
            "packed_segments": segments._replace(mean_response=0.0),
        }
    mask = packed_attention_mask(segments.row_ids, segments.segment_ids)
    return {"attention_mask": layer_masks(model.config, mask, position_ids)}


def needs_dense_mask(model: PreTrainedModel, segments: Segments) -> bool:
    """Return whether a mask is the only way, or the faster one."""
    shares_prompts = segments.responses is not None
    # The model has to call its attention by name. The window of a response reaches into its prompt.
    has_window = getattr(model.config, "sliding_window", None)
    if not getattr(model, "_supports_attention_backend", False) or (shares_prompts and has_window):
        return True
    choices = acceleration()
    if choices.attn_implementation == "auto":
        return not supports_varlen(model.device, model.dtype, head_size(model.config))
    return model.device.type != "cpu" or segments.mean_response < choices.min_response


def supports_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether FlashAttention supports a model."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and head_dim % HEAD_MULTIPLE == 0
        and head_dim <= MAX_HEAD
        and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= MIN_CAPABILITY)
    )


def head_size(config: PreTrainedConfig) -> int:
    """Return the number of dimensions of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed_segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as an attention function of transformers.

    query, key, value: [B, H, T, D]. packed_segments: None for the attention of transformers.
    Returns [B, T, H, D], and None in the place of attention weights.
    """
    if packed_segments is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    is_grouped, shape = key.shape[1] != query.shape[1], query.shape[::2]
    query, key, value = (each.transpose(1, 2).flatten(end_dim=1) for each in (query, key, value))
    _, _, own, prompts, responses, _ = packed_segments
    if responses is not None:
        output: Any = shared_prompt_attention(query, key, value, own, prompts, responses, scaling)
    else:
        output = varlen_attn(
            query,
            key,
            value,
            *_lengths(own, own),
            scale=scaling,
            # A model counts the token itself in its window, the kernel does not.
            window_size=(sliding_window - 1, 0) if sliding_window else (-1, 0),
            **(VARLEN_GQA if is_grouped else {}),
        )
    return output.unflatten(0, shape), None


def _lengths(of_queries: Spans, of_keys: Spans) -> tuple[Tensor, Tensor, int, int]:
    """Return what kernels of FlashAttention need to know of segments."""
    return of_queries.bounds, of_keys.bounds, of_queries.longest, of_keys.longest


# --- responses that share a prompt --------------------------------------------------------------

# Queries, keys and values [P, H, D].
States = tuple[Tensor, Tensor, Tensor]


class _SharedPrompts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        query, key, value, own, prompts, responses, scaling = arguments
        ctx.spans, ctx.scaling = (own, prompts, responses), scaling
        output, lse = flash_forward((query, key, value), own, own, True, scaling)
        chosen, seen = responses.places, prompts.places
        states = query[chosen], key[seen], value[seen]
        to_prompts, other_lse = flash_forward(states, responses, prompts, False, scaling)
        own_lse = lse[:, chosen]
        both = torch.logaddexp(own_lse, other_lse)
        of_own, of_other = ((each - both).exp().T[..., None] for each in (own_lse, other_lse))
        merged = of_own * output[chosen] + of_other * to_prompts
        output[chosen], lse[:, chosen] = merged.to(output.dtype), both
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        grad, scaling = grad_outputs[0].contiguous(), ctx.scaling
        own, prompts, responses = ctx.spans
        # The kernels derive the share of each score from the output and log-sum-exp of all.
        outputs = grad, output, lse
        gradients = flash_backward(outputs, (query, key, value), own, own, True, scaling)
        chosen, seen = responses.places, prompts.places
        outputs = grad[chosen], output[chosen], lse[:, chosen].contiguous()
        states = query[chosen], key[seen], value[seen]
        others = flash_backward(outputs, states, responses, prompts, False, scaling)
        for total, added, index in zip(gradients, others, (chosen, seen, seen), strict=True):
            total.index_add_(0, index, added)
        return *gradients, None, None, None, None


# The attention [P, H, D] of all positions P, which torch does not compile.
shared_prompt_attention = torch.compiler.disable(_SharedPrompts.apply)


def flash_forward(
    states: States, of_queries: Spans, of_keys: Spans, is_causal: bool, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Return the attention [P, H, D] of segments of queries to segments of keys.

    By FlashAttention on a GPU, and by a CPU's kernel for each segment. Also returns the log-sum-exp
    [H, P] of the scores of each query.
    """
    query, key, value = states
    if query.is_cuda:
        return torch.ops.aten._flash_attention_forward(
            *states, *_lengths(of_queries, of_keys), 0.0, is_causal, False, scale=scaling
        )[:2]
    output, lse = torch.empty_like(query), query.new_empty(query.shape[1::-1], dtype=torch.float32)
    key, value = (_for_all_heads(each, query) for each in (key, value))
    for rows, keys in _segments(of_queries, of_keys):
        part, lse[:, rows] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *map(_batched, (query[rows], key[keys], value[keys])), 0.0, is_causal, scale=scaling
        )
        output[rows] = part[0].transpose(0, 1)
    return output, lse


def flash_backward(
    outputs: States,
    states: States,
    of_queries: Spans,
    of_keys: Spans,
    is_causal: bool,
    scaling: float | None,
) -> list[Tensor]:
    """Return the gradients of queries, keys and values.

    outputs: The gradient of the output, and what flash_forward returns.
    """
    (grad, output, lse), (query, key, value) = outputs, states
    if query.is_cuda:
        # Random numbers of dropout, which there is none of.
        random = query.new_empty(2, dtype=torch.uint64), query.new_empty(0)
        inputs = grad, *states, output, lse, *_lengths(of_queries, of_keys)
        return torch.ops.aten._flash_attention_backward(
            *inputs, 0.0, is_causal, *random, scale=scaling
        )
    all_keys, all_values = (_for_all_heads(each, query) for each in (key, value))
    gradients = [torch.zeros_like(each) for each in (query, all_keys, all_values)]
    for rows, keys in _segments(of_queries, of_keys):
        parts = grad[rows], query[rows], all_keys[keys], all_values[keys], output[rows]
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(_batched, parts), lse[None, :, rows], 0.0, is_causal, scale=scaling
        )
        for total, place, added in zip(gradients, (rows, keys, keys), found, strict=True):
            total[place] = added[0].transpose(0, 1)
    # Heads of keys and values that several heads of queries share.
    heads = key.shape[1], -1
    return [gradients[0], *(each.unflatten(1, heads).sum(dim=2) for each in gradients[1:])]


def _for_all_heads(states: Tensor, query: Tensor) -> Tensor:
    """Return keys or values with as many heads as the queries."""
    return states.repeat_interleave(query.shape[1] // states.shape[1], dim=1)


def _batched(states: Tensor) -> Tensor:
    """Return states [P, H, D] of a segment as [1, H, P, D]."""
    return states.transpose(0, 1)[None]


def _segments(of_queries: Spans, of_keys: Spans) -> Iterator[tuple[slice, slice]]:
    """Yield the queries and the keys of each segment that has queries."""
    bounds = (pairwise(spans.bounds.tolist()) for spans in (of_queries, of_keys))
    for rows, keys in zip(*(starmap(slice, pairs) for pairs in bounds), strict=True):
        if rows.start < rows.stop:
            yield rows, keys
