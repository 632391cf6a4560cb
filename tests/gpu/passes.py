"""Forward and backward passes of small models of several families, on a GPU and a CPU in fp32."""

import contextlib
import copy

import numpy as np
import torch

from snakechat.modeling import acceleration
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy
from snakechat.modeling.models import DTYPES, choose_device, make_causal
from snakechat.workflow.placement import placement_of
from support.families import FAMILIES, WINDOWS, spread

# Of gradients in bf16 of models with large weights: a dense mask has errors of 0.02 to 0.16.
GRADIENT_ERROR = 0.25
# Heads of 32 dimensions, and sequences of several blocks of a mask.
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 512}
KERNEL_MODELS = {
    "opt": {**FAMILIES["opt"], **WIDE, "word_embed_proj_dim": 64},
    "qwen3": {**FAMILIES["qwen3"], **WIDE, "num_key_value_heads": 1, "head_dim": 32},
    "mistral, window": {**WINDOWS["mistral, window"], **WIDE, "sliding_window": 50},
}


@contextlib.contextmanager
def configured(gpus=1, **placement):
    """Context in which this process is configured for a placement; yields its device."""
    with acceleration.using(acceleration.current()):
        yield choose_device(placement_of({"gpus_per_node": gpus, **placement}))


def long_examples(num_responses):
    """Return 24 rows with responses of up to 120 tokens."""
    random = np.random.default_rng(2)
    return Examples(
        *(
            [random.integers(10, 300, random.integers(1, 120)).tolist() for _ in range(24)]
            for _ in range(1 + num_responses)
        )
    )


def loss_and_gradients(model, device, examples, micro_batch_tokens):
    """Return the sum of the log-probabilities of a model, and its gradients in fp32."""
    policy = Policy(model).to(device)
    policy.zero_grad()
    micro_batches = examples.micro_batches(
        np.arange(len(examples)),
        micro_batch_tokens,
        policy.supports_packing,
        device,
        with_prompts=True,
    )
    loss = sum(policy(micro_batch.batch, return_sum=True) for micro_batch in micro_batches)
    loss.backward()
    grads = [weight.grad.float().cpu().flatten() for weight in policy.parameters()]
    return loss.item(), torch.cat(grads)


def kernel_errors(name, num_responses, tokenizer, dtype="bf16", **placement):
    """Return the relative errors of the loss and the gradients on a GPU.

    name: One of KERNEL_MODELS.
    """
    examples = long_examples(num_responses)
    model = spread(make_causal(KERNEL_MODELS[name], tokenizer, 1)).eval()
    expected_loss, expected = loss_and_gradients(
        copy.deepcopy(model), torch.device("cpu"), examples, 1024
    )
    with configured(**placement) as device:
        loss, grads = loss_and_gradients(model.to(DTYPES[dtype]), device, examples, 1024)
    return {
        "loss_error": abs(loss - expected_loss) / abs(expected_loss),
        "gradient_error": ((grads - expected).norm() / expected.norm()).item(),
    }
