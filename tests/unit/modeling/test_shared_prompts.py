"""Attention of responses that share a prompt, against a dense mask."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from snakechat.modeling import packing, shared_prompts
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy

# Rows with responses of several lengths, one of which is empty.
PROMPT_LENGTHS = [7, 1, 12]
RESPONSE_LENGTHS = [[5, 9, 1], [1, 3, 0], [8, 2, 20]]


def make_policy(heads=4, key_value_heads=2, model_type="llama"):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=128,
    )
    return Policy(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))


def make_examples():
    random = np.random.default_rng(0)

    def ids(lengths):
        return [random.integers(3, 50, size=length) for length in lengths]

    return Examples(ids(PROMPT_LENGTHS), *map(ids, RESPONSE_LENGTHS))


def logprobs_and_gradients(policy, max_tokens):
    """Log-probabilities of all tokens, and the gradients of a sum that weighs them differently."""
    policy.zero_grad()
    logprobs, rows = [], []
    for micro_batch in make_examples().micro_batches(
        np.arange(3), max_tokens, True, torch.device("cpu")
    ):
        logprobs.append(policy(micro_batch.batch))
        (logprobs[-1] * torch.linspace(-1, 2, len(logprobs[-1]))).sum().backward()
        rows.append(micro_batch.batch.inputs.segments)
    gradients = [weight.grad.clone() for weight in policy.parameters() if weight.grad is not None]
    return torch.cat(logprobs).detach(), gradients, rows


# All rows in a packed sequence, and one in each.
@pytest.mark.parametrize("max_tokens", [400, 1])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_passes_equal_those_with_a_dense_mask(heads, max_tokens, monkeypatch):
    policy = make_policy(*heads)
    expected, expected_gradients, segments = logprobs_and_gradients(policy, max_tokens)
    assert not any(segments)
    monkeypatch.setattr(shared_prompts, "MIN_RESPONSE", 1)
    monkeypatch.setattr(packing, "packed_attention_mask", None)
    found, gradients, segments = logprobs_and_gradients(policy, max_tokens)
    assert all(segments)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other, atol=2e-5, rtol=1e-4)


def test_a_model_with_a_sliding_window_takes_a_dense_mask(monkeypatch):
    policy = make_policy(model_type="mistral")
    policy.model.config.sliding_window = 4
    expected, expected_gradients, _ = logprobs_and_gradients(policy, 400)
    monkeypatch.setattr(shared_prompts, "MIN_RESPONSE", 1)
    found, gradients, segments = logprobs_and_gradients(policy, 400)
    assert all(segments)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, gradients, expected_gradients))
