"""Sampling of tokens from logits: the distribution, rare tokens, and logits that are not finite."""

import math

import pytest
import torch

from snakechat.modeling.decoding import sample_tokens


def test_sample_tokens_inverts_the_cumulative_distribution():
    # 1/2, 1/8, 0, 3/8: the third token has probability 0.
    logits = torch.tensor([[0.5, 0.125, 0.0, 0.375]]).log()
    uniforms = torch.tensor([[0.0, 0.49, 0.5, 0.62, 0.63, 0.9999999999]], dtype=torch.float64)
    assert sample_tokens(logits, uniforms, 1.0).tolist() == [[0, 0, 1, 1, 3, 3]]
    # Temperature 1/2 squares and normalizes the probabilities: 16, 1, 0, 9 of 26.
    uniforms = torch.tensor([[15.9, 16.1, 17.1]], dtype=torch.float64) / 26
    assert sample_tokens(logits, uniforms, 0.5).tolist() == [[0, 1, 3]]
    assert sample_tokens(logits, uniforms, 0).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_give_a_token_of_the_vocabulary(value):
    # Elsewhere, the kernels of a GPU would end the process before the error is raised.
    logits = torch.full((2, 100), value)
    logits[1, 5] = 0.0
    tokens = sample_tokens(logits, torch.full((2, 4), 0.7, dtype=torch.float64), 1.0)
    assert ((tokens >= 0) & (tokens < 100)).all()


def test_rare_tokens_of_a_large_vocabulary_are_sampled():
    # The last of 50,000 tokens has probability 1e-9, below the resolution of fp32 near 1.
    logits = torch.zeros(1, 50_000)
    logits[0, -1] = math.log(1e-9 * 50_000)
    uniforms = torch.tensor([[1 - 2e-9, 1 - 0.5e-9]], dtype=torch.float64)
    assert sample_tokens(logits, uniforms, 1.0).tolist() == [[49_998, 49_999]]
