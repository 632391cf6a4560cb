"""Estimates of the KL divergence of a model on its responses, by hand and by transformers."""

from math import log

import numpy as np
import pytest
import torch

from conftest import INIT
from snakechat.evaluation import response_divergence
from snakechat.evaluation.response_divergence import (
    Candidates,
    divergences,
    find_candidates,
    kl_estimates,
)
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy
from snakechat.modeling.models import make_causal

TEMPERATURE = 0.8
PROMPTS = [[2, 5, 6], [2, 7]]
RESPONSES = [[[8, 9, 3], [4, 3]], [[5], [6, 6, 7, 3]]]


def test_estimates_by_hand():
    # p = (1/2, 1/4, 1/8, 1/8) and q = (1/4, 1/4, 1/4, 1/4); the two most probable tokens are 0
    # and 1. The sum over both is log(2) / 2. Token 3 adds its log-ratio, log(1/2).
    candidates = Candidates(
        torch.tensor([[1, 0, 1], [3, 0, 1]]),
        torch.tensor([[1 / 4, 1 / 2, 1 / 4], [1 / 8, 1 / 2, 1 / 4]]).log(),
    )
    ratios = candidates.logprobs.double() - log(1 / 4)
    expected = [log(2) / 2, log(2) / 2 - log(2)]
    assert kl_estimates(candidates, ratios).tolist() == pytest.approx(expected, abs=1e-6)
    # The expectation over the sampled token: 3/4 of the first value and 1/4 of the second are the
    # KL, log(2) / 2 - log(2) / 4.
    assert 3 / 4 * expected[0] + 1 / 4 * expected[1] == pytest.approx(log(2) / 4)


def initialized(tokenizer, seed):
    """A policy whose random weights are large, so that no distribution is uniform."""
    return Policy(make_causal({**INIT, "init_std": 0.3}, tokenizer, seed)).eval()


def full_divergences(policy, other):
    """The log-ratio and the KL over the vocabulary [A, n] of each response by transformers."""
    results = np.zeros((2, 2, 2))
    for number, responses in enumerate(RESPONSES):
        for row, (prompt, response) in enumerate(zip(PROMPTS, responses, strict=True)):
            ids = torch.tensor([prompt + response])
            p, q = (
                (
                    model.model(ids).logits[0, len(prompt) - 1 : -1].double() / TEMPERATURE
                ).log_softmax(dim=1)
                for model in (policy, other)
            )
            tokens = torch.tensor(response)[:, None]
            results[:, number, row] = [
                (p - q).gather(1, tokens).sum().item(),
                (p.exp() * (p - q)).sum().item(),
            ]
    return results


@pytest.mark.parametrize("micro_batch_tokens", [8, 64])
@pytest.mark.parametrize("k", [3, 10**6])
@torch.no_grad()
def test_divergences_are_those_of_transformers(tokenizer, monkeypatch, micro_batch_tokens, k):
    monkeypatch.setattr(response_divergence, "TOP_K", k)
    policy, other = (initialized(tokenizer, seed) for seed in (1, 2))
    examples = Examples(PROMPTS, *RESPONSES)
    candidates = find_candidates(policy, examples, len(tokenizer), micro_batch_tokens, TEMPERATURE)
    found = divergences(other, examples, candidates, micro_batch_tokens, TEMPERATURE)
    log_ratios, full = full_divergences(policy, other)
    np.testing.assert_allclose(found[0], log_ratios, rtol=1e-4, atol=1e-5)
    if k > 3:
        np.testing.assert_allclose(found[1], full, rtol=1e-4, atol=1e-5)
    else:
        assert np.abs(found[1] - full).min() > 1e-3


@torch.no_grad()
def test_candidates_are_tokens_that_each_model_has(tokenizer):
    # Output layers are padded differently: the sizes of a family may share a tokenizer.
    policy, other = (initialized(tokenizer, seed) for seed in (1, 2))
    policy.model.resize_token_embeddings(4 * len(tokenizer), mean_resizing=False)
    examples = Examples(PROMPTS, *RESPONSES)
    candidates = find_candidates(policy, examples, len(tokenizer), 64, TEMPERATURE)
    assert candidates.tokens.max() < len(tokenizer)
    found = divergences(other, examples, candidates, 64, TEMPERATURE)
    assert np.isfinite(found).all()
