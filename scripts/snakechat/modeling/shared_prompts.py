"""Attention of responses that share a prompt, without a dense mask, on a CPU.

A dense mask makes a kernel compute every position of a packed sequence: for eight responses, most
of them are pairs of different responses. Here each part is an attention of its own: a prompt to
itself, all responses to their prompt, and each response to itself. The last two are merged by their
log-sum-exp, forward and backward, as ring attention does (Liu et al. 2023, "Ring attention with
blockwise transformers").

Shapes: B packed sequences, H heads, T positions, D dimensions of a head.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# Mean tokens of a response from which on it is faster than a dense mask.
MIN_RESPONSE = 64

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Group(NamedTuple):
    """Where the prompt and the responses of a row are in a packed sequence, one after another.

    sequence: The number of the packed sequence. No response is empty.
    """

    sequence: int
    prompt: slice
    responses: list[slice]


@contextlib.contextmanager
def for_any_length() -> Iterator[None]:
    """Context in which responses of any length have this attention, to check it."""
    global MIN_RESPONSE
    previous, MIN_RESPONSE = MIN_RESPONSE, 0
    try:
        yield
    finally:
        MIN_RESPONSE = previous


def are_long(groups: list[Group]) -> bool:
    """Return whether responses are long enough for this attention to be the faster one."""
    lengths = [part.stop - part.start for group in groups for part in group.responses]
    return sum(lengths) >= MIN_RESPONSE * max(len(lengths), 1)


def supports_shared_prompts(model: PreTrainedModel) -> bool:
    """Return whether a model calls its attention by name, without a sliding window, on a CPU."""
    return (
        model.device.type == "cpu"
        and getattr(model, "_supports_attention_backend", False)
        and not getattr(model.config, "sliding_window", None)
    )


def shared_prompt_arguments(groups: list[Group], row_ids: torch.Tensor) -> dict[str, Any]:
    """Return the arguments of a model's forward pass that uses this attention.

    A mask of four dimensions keeps models from building one; nothing reads it.
    """
    AttentionInterface.register("sdpa", shared_prompt_attention)
    return {"attention_mask": row_ids.new_empty(0, 0, 0, 0), "prompt_groups": groups}


def shared_prompt_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    prompt_groups: list[Group] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as an attention function of transformers.

    Args:
        query, key, value: [B, H, T, D], the latter two maybe with fewer heads.
        prompt_groups: The rows of the packed sequences; None for the attention of transformers.

    Returns:
        [B, T, H, D], and None in the place of attention weights. Padding is 0.
    """
    if prompt_groups is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    output: torch.Tensor = _SharedPrompts.apply(query, key, value, prompt_groups, scaling)
    return output.transpose(1, 2), None


class _SharedPrompts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        groups: list[Group],
        scaling: float | None,
    ) -> torch.Tensor:
        ctx.groups, ctx.scaling = groups, scaling
        copies = query.shape[1] // key.shape[1]
        keys, values = (states.repeat_interleave(copies, dim=1) for states in (key, value))
        output = torch.zeros_like(query)
        # Of the scores of each position.
        logsumexp = torch.zeros(query.shape[:3])
        for number, prompt, responses in groups:
            q, k, v, out, lse = (
                states[number : number + 1] for states in (query, keys, values, output, logsumexp)
            )
            out[:, :, prompt], lse[:, :, prompt] = _attention(q, k, v, prompt, prompt, scaling)
            if not responses:
                continue
            # All responses see the whole prompt.
            span = slice(responses[0].start, responses[-1].stop)
            out[:, :, span], lse[:, :, span] = _attention(q, k, v, span, prompt, scaling)
            for part in responses:
                own, own_lse = _attention(q, k, v, part, part, scaling)
                both = torch.logaddexp(lse[:, :, part], own_lse)
                weights = ((each - both).exp()[..., None] for each in (lse[:, :, part], own_lse))
                pairs = zip((out[:, :, part], own), weights, strict=True)
                out[:, :, part] = sum(states * weight for states, weight in pairs)
                lse[:, :, part] = both
        ctx.save_for_backward(query, key, value, output, logsumexp)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, logsumexp = ctx.saved_tensors
        heads, copies = key.shape[1], query.shape[1] // key.shape[1]
        keys, values = (states.repeat_interleave(copies, dim=1) for states in (key, value))
        tensors = query, keys, values, output, logsumexp, grad_outputs[0].contiguous()
        gradients = [torch.zeros_like(states) for states in (query, keys, values)]
        for number, prompt, responses in ctx.groups:
            q, k, v, out, lse, grad = (states[number : number + 1] for states in tensors)
            parts = [(prompt, prompt), *((part, part) for part in responses)]
            if responses:
                parts.append((slice(responses[0].start, responses[-1].stop), prompt))
            for queries, attended in parts:
                found = _flash_backward(
                    grad[:, :, queries],
                    q[:, :, queries],
                    k[:, :, attended],
                    v[:, :, attended],
                    out[:, :, queries],
                    lse[:, :, queries],
                    0.0,
                    queries == attended,
                    scale=ctx.scaling,
                )
                places = queries, attended, attended
                for total, place, added in zip(gradients, places, found, strict=True):
                    total[number, :, place] += added[0]
        of_query, *of_others = gradients
        # Heads of keys and values that several heads of queries share.
        of_key, of_value = (states.unflatten(1, (heads, copies)).sum(dim=2) for states in of_others)
        return of_query, of_key, of_value, None, None


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: slice,
    attended: slice,
    scaling: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of positions to others, causal to themselves, and its log-sum-exp."""
    tensors = query[:, :, queries], key[:, :, attended], value[:, :, attended]
    output, lse = _flash(*tensors, 0.0, queries == attended, scale=scaling)
    return output, lse
