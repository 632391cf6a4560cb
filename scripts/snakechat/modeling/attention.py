"""Attention kernels for packed sequences, other than SDPA with a dense mask.

A dense mask has B * T * T elements, kernels of SDPA compute every block of it, and keys and values
of grouped-query models are copied to all heads. flex_attention skips blocks in which no token
attends to another, and varlen_attn (FlashAttention) knows the boundaries of rows only: it needs
rows of one response, because responses that share a prompt do not attend to one another.

transformers calls kernels by name (AttentionInterface). Models keep the name "sdpa", as they also
sample: a function of that name chooses the kernel by its arguments. It is not registered before a
batch needs it, so that the default path consists of transformers' functions alone.
"""

import inspect
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    flex_attention,
)
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from snakechat.modeling import acceleration
from snakechat.modeling.compilation import check_compiler, compile_up_to
from snakechat.modeling.packing import Segments
from snakechat.workflow.errors import InputError

# The first GPUs with these kernels: Ampere.
MIN_CAPABILITY = (8, 0)
# Dimensions of a head: FlashAttention takes multiples up to a limit, and Triton multiplies matrices
# of at least 16 columns.
VARLEN_HEAD_MULTIPLE, VARLEN_MAX_HEAD, FLEX_MIN_HEAD = 8, 256, 16
MAX_FLEX_KERNELS = 64
# torch 2.11 has no argument for it: there, varlen_attn always takes fewer heads of keys and values.
HAS_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
VARLEN_GQA: dict[str, Any] = {"enable_gqa": True} if HAS_ENABLE_GQA else {}


def choose_kernel(model: PreTrainedModel, segments: Segments) -> str:
    """Return the kernel of a packed batch: varlen, flex or sdpa.

    Raises:
        InputError: The model or the GPU does not support the kernel that the placement names.
    """
    choice = acceleration.current().attn_implementation
    kernel = "varlen" if choice == "auto" else choice
    if kernel == "sdpa" or (kernel == "varlen" and segments.boundaries is None):
        return "sdpa"
    problem = kernel_problem(kernel, model.device, model.dtype, head_size(model.config))
    if problem and choice != "auto":
        raise InputError(
            f"placement: attn_implementation: {kernel} {problem}: set it to auto or sdpa"
        )
    return "sdpa" if problem else kernel


def kernel_problem(
    kernel: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Return what a kernel lacks for a model, or None if it supports it."""
    if kernel == "varlen" and dtype not in (torch.bfloat16, torch.float16):
        return f"needs bf16 or fp16, and the model has {str(dtype).removeprefix('torch.')}"
    if kernel == "varlen" and (head_dim % VARLEN_HEAD_MULTIPLE or head_dim > VARLEN_MAX_HEAD):
        return (
            f"needs heads of a multiple of {VARLEN_HEAD_MULTIPLE} and at most {VARLEN_MAX_HEAD}"
            f" dimensions, and the model has {head_dim}"
        )
    if kernel == "flex" and head_dim < FLEX_MIN_HEAD:
        return f"needs heads of {FLEX_MIN_HEAD} or more dimensions, and the model has {head_dim}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"needs a GPU of compute capability 8.0 or later, and this is a {name}"
    return None


def head_size(config: PreTrainedConfig) -> int:
    """Return the number of dimensions of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def varlen_arguments(segments: Segments) -> dict[str, Any]:
    """Return the arguments of a model's forward pass that uses varlen.

    The names are those of transformers' flash attention. A mask of four dimensions keeps models
    from building one; nothing reads it.
    """
    register()
    return {
        "attention_mask": segments.row_ids.new_empty(0, 0, 0, 0),
        "cu_seq_lens_q": segments.boundaries,
        "max_length_q": segments.longest,
    }


def packed_block_mask(segments: Segments) -> BlockMask:
    """Return packing.packed_attention_mask as flex_attention takes it."""
    register()
    row_ids, segment_ids = segments.row_ids, segments.segment_ids

    def attends(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        own = (segment_ids[b, k] == 0) | (segment_ids[b, q] == segment_ids[b, k])
        return (row_ids[b, q] == row_ids[b, k]) & (q >= k) & own

    return _block_mask(attends, row_ids)


def window_block_mask(mask: BlockMask, position_ids: torch.Tensor, window: int) -> BlockMask:
    """Return packing.sliding_window_mask of a mask for flex_attention."""

    def in_window(
        b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        return position_ids[b, k] > position_ids[b, q] - window

    return _block_mask(and_masks(mask.mask_mod, in_window), position_ids)


def _block_mask(mask_mod: Any, ids: torch.Tensor) -> BlockMask:
    """Return the mask of a function for sequences of ids [B, T]."""
    size, length = ids.shape
    mask = create_block_mask(mask_mod, size, None, length, length, device=ids.device)
    # GPT-2 asks a mask for it.
    cast(Any, mask).ndim = 4
    return mask


def register() -> None:
    """Have models that transformers runs by SDPA choose the kernel by the batch."""
    AttentionInterface.register("sdpa", packed_attention)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
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
    is_grouped = key.shape[1] != query.shape[1]
    if cu_seq_lens_q is not None:
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
            # The token itself counts in a model's window, and not in that of the kernel.
            window_size=(sliding_window - 1, 0) if sliding_window else (-1, 0),
            **(VARLEN_GQA if is_grouped else {}),
        )
        assert isinstance(output, torch.Tensor)
        return output.unflatten(0, (size, length)), None
    if isinstance(attention_mask, BlockMask):
        # Within a compiled layer, torch compiles it with the layer.
        is_alone = query.is_cuda and not torch.compiler.is_compiling()
        function = compiled_flex_attention() if is_alone else flex_attention
        output = function(
            query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=is_grouped
        )
        return output.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )


@cache
def compiled_flex_attention() -> Any:
    """Return flex_attention as a fused kernel: without compilation it stores all scores.

    A process has a kernel for each model and kind of mask, times about four kinds of shapes. More
    of them than the limit are an error: torch would go on without compilation.
    """
    check_compiler("attn_implementation: flex")
    return compile_up_to(MAX_FLEX_KERNELS, flex_attention, fullgraph=True)
