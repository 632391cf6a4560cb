"""Attention of packed sequences by FlashAttention, in place of SDPA with a dense mask.

A dense mask has B * T * T elements, kernels of SDPA compute every block of it, and keys and values
of grouped-query models are copied to all heads. varlen_attn (FlashAttention) knows the boundaries
of rows only: it needs rows of one response, because responses that share a prompt do not attend to
one another.

transformers calls kernels by name (AttentionInterface). Models keep the name "sdpa", as they also
sample: a function of that name chooses the kernel by its arguments. It is not registered before a
batch needs it, so that the default path consists of transformers' functions alone.
"""

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from snakechat.modeling.packing import Segments

# The first GPUs with FlashAttention: Ampere.
MIN_CAPABILITY = (8, 0)
# Dimensions of a head that FlashAttention takes: multiples up to a limit.
HEAD_MULTIPLE, MAX_HEAD = 8, 256
# torch 2.11 has no argument for it: there, varlen_attn always takes fewer heads of keys and values.
HAS_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
VARLEN_GQA: dict[str, Any] = {"enable_gqa": True} if HAS_ENABLE_GQA else {}


def supports_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether varlen_attn supports a model."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and head_dim % HEAD_MULTIPLE == 0
        and head_dim <= MAX_HEAD
        and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= MIN_CAPABILITY)
    )


def head_size(config: PreTrainedConfig) -> int:
    """Return the number of dimensions of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def varlen_arguments(segments: Segments) -> dict[str, Any]:
    """Return the arguments of a model's forward pass that uses varlen_attn.

    The names are those of transformers' flash attention. A mask of four dimensions keeps models
    from building one; nothing reads it.
    """
    AttentionInterface.register("sdpa", packed_attention)
    return {
        "attention_mask": segments.row_ids.new_empty(0, 0, 0, 0),
        "cu_seq_lens_q": segments.boundaries,
        "max_length_q": segments.longest,
    }


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as an attention function of transformers.

    Args:
        query, key, value: [B, heads, T, head_dim], the latter two maybe with fewer heads.
        attention_mask: See forward.attention_arguments.
        cu_seq_lens_q: int32 [N + 1], boundaries of segments in the flattened positions.
        max_length_q: Tokens of the longest segment.

    Returns:
        [B, T, heads, head_dim], and None in the place of attention weights.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    is_grouped = key.shape[1] != query.shape[1]
    size, _, length, _ = query.shape
    query, key, value = (
        states.transpose(1, 2).flatten(end_dim=1) for states in (query, key, value)
    )
    output = varlen_attn(
        query,
        key,
        value,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        # A model counts the token itself in its window, the kernel does not.
        window_size=(sliding_window - 1, 0) if sliding_window else (-1, 0),
        **(VARLEN_GQA if is_grouped else {}),
    )
    assert isinstance(output, torch.Tensor)
    return output.unflatten(0, (size, length)), None
