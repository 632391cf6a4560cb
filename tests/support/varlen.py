"""Variable-length attention on a CPU, which has no kernel for it."""

from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional

from snakechat.modeling.attention import VARLEN_GQA


def loop_over_segments(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False
):
    """What varlen_attn computes, by SDPA for each segment."""
    bounds = cu_seq_q.tolist()
    assert torch.equal(cu_seq_q, cu_seq_k) and cu_seq_q.dtype == torch.int32
    assert bounds[0] == 0 and bounds[-1] == len(query)
    assert max_q == max_k == max(np.diff(bounds))
    is_grouped = query.shape != key.shape
    assert enable_gqa == (is_grouped and bool(VARLEN_GQA))
    outputs = []
    for start, end in pairwise(bounds):
        columns = torch.arange(end - start, device=query.device)
        distance = columns[:, None] - columns
        mask = distance >= 0
        if window_size[0] >= 0:
            mask &= distance <= window_size[0]
        assert window_size[1] == 0
        states = (tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value))
        output = functional.scaled_dot_product_attention(
            *states, attn_mask=mask, scale=scale, enable_gqa=is_grouped
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)
