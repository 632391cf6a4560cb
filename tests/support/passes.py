"""Losses and gradients of packed micro-batches, for tests of other ways to compute them."""

from dataclasses import replace

import numpy as np
import torch

from snakechat.modeling.forward import Policy
from snakechat.modeling.loading import load_causal
from snakechat.modeling.models import accelerated, acceleration, make_causal
from snakechat.modeling.saving import save_model
from support.families import spread

CPU = torch.device("cpu")


def saved_policy(keys, tokenizer, folder):
    """Return a policy with large weights, whose model was loaded from a folder."""
    # Loaded models have no dropout.
    save_model(make_causal(keys, tokenizer, 1), tokenizer, folder)
    return Policy(spread(load_causal(folder, "fp32", tokenizer)))


def sample_responses(model, prompts, sampler):
    """Return the responses [g][row] that a sampler samples from a model."""
    sampler.update(model)
    responses, _ = sampler.sample(prompts, range(len(prompts)))
    return responses


def loss_and_gradients(policy, examples, micro_batch_tokens=60):
    """Return the sum of all log-probabilities, and its gradients, over several micro-batches."""
    policy.zero_grad()
    rows, device = np.arange(len(examples)), next(policy.parameters()).device
    with accelerated(replace(acceleration(), micro_batch_tokens=micro_batch_tokens)):
        micro_batches = list(examples.micro_batches(rows, True, device, with_prompts=True))
    assert len(micro_batches) > 1
    loss = sum(policy(micro_batch.batch, return_sum=True) for micro_batch in micro_batches)
    loss.backward()
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    return loss.detach(), torch.cat([weight.grad.float().cpu().flatten() for weight in weights])


def assert_equal(actual, expected):
    """Assert that losses and gradients are equal up to rounding."""
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=0)
    assert (actual[1] - expected[1]).norm() < 1e-5 * expected[1].norm()
