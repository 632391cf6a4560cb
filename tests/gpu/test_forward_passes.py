"""Forward passes, gradients and generation on a GPU, compared with a CPU in fp32."""

import copy

import numpy as np
import pytest
import torch

from gpu.workloads import configured
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy
from snakechat.modeling.generation import Sampler
from snakechat.modeling.models import DTYPES, make_causal
from support.families import FAMILIES, WINDOWS, spread
from support.passes import loss_and_gradients, sample_responses

PROMPTS = [[0, 9, 8, 7, 6, 5, 40, 41], [0, 21], [0, 30, 31, 32], [0, 50, 51]]
# Of gradients in bf16 of models with large weights: a dense mask has errors of 0.02 to 0.16.
GRADIENT_ERROR = 0.25
# Heads of 32 dimensions, and sequences of several blocks of a mask.
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 512}
KERNEL_MODELS = {
    "opt": {**FAMILIES["opt"], **WIDE, "word_embed_proj_dim": 64},
    "qwen3": {**FAMILIES["qwen3"], **WIDE, "num_key_value_heads": 1, "head_dim": 32},
    "mistral, window": {**WINDOWS["mistral, window"], **WIDE, "sliding_window": 50},
}


def long_examples(num_responses):
    """Return 24 rows with responses of up to 120 tokens."""
    random = np.random.default_rng(2)
    return Examples(
        *(
            [random.integers(10, 300, random.integers(1, 120)).tolist() for _ in range(24)]
            for _ in range(1 + num_responses)
        )
    )


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module")
def device(request):
    """The CPU, and the first GPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch finds none")
    return torch.device(request.param)


@pytest.fixture(params=["opt", "qwen3"])
def model(request, tokenizer):
    model = spread(make_causal(FAMILIES[request.param], tokenizer, 1))
    # Without dropout.
    return model.eval()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True, scope="module")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("num_responses", [1, 2])
@pytest.mark.parametrize(
    ("attn_implementation", "dtype", "tolerance"),
    [
        ("sdpa", "fp32", 1e-2),
        ("sdpa", "fp16", GRADIENT_ERROR),
        ("sdpa", "bf16", GRADIENT_ERROR),
        ("auto", "bf16", GRADIENT_ERROR),
        ("auto", "fp32", 1e-2),
    ],
)
@pytest.mark.parametrize("name", KERNEL_MODELS)
def test_attention_kernels_equal_a_dense_mask_on_a_cpu(
    name, attn_implementation, dtype, tolerance, num_responses, compiled, device, tokenizer
):
    examples = long_examples(num_responses)
    model = spread(make_causal(KERNEL_MODELS[name], tokenizer, 1)).eval()
    policy = Policy(copy.deepcopy(model))
    expected_loss, expected = loss_and_gradients(policy, examples, 1024)
    with configured(attn_implementation=attn_implementation, compile=compiled):
        policy = Policy(model.to(DTYPES[dtype])).to(device)
        loss, grads = loss_and_gradients(policy, examples, 1024)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=tolerance / 50)
    assert (grads - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_greedy_responses_equal_those_of_a_cpu(cuda_graphs, model, tokenizer, device):
    def sample():
        return sample_responses(model, PROMPTS, Sampler([tokenizer.eos_token_id], 40, 0, 2))

    expected = sample()
    model.to(device)
    with configured(device.type == "cuda", cuda_graphs=cuda_graphs):
        assert sample() == expected
