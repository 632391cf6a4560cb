"""Sampling of tokens from logits by one random number each.

Shapes: b rows of a batch, V entries of the vocabulary, c tokens of each row.
"""

import torch
from torch.nn import functional

# Probabilities that are summed at a time to sample a token.
CDF_BLOCK = 64
# The largest weight of a distribution as an integer. The sum of 32,768 of them fits 64 bits.
LARGEST_WEIGHT = 2**48


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
        weights: [..., n], not normalized.
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
