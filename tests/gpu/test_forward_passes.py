"""Forward passes, gradients and generation on a GPU, compared with a CPU in fp32."""

import copy

import pytest
import torch

from gpu.passes import GRADIENT_ERROR, KERNEL_MODELS, configured, kernel_errors, loss_and_gradients
from snakechat.modeling import acceleration
from snakechat.modeling.batching import Examples
from snakechat.modeling.generation import sample_responses
from snakechat.modeling.models import DTYPES, make_causal
from support.families import FAMILIES, spread

PROMPTS = [[0, 9, 8, 7, 6, 5, 40, 41], [0, 21], [0, 30, 31, 32], [0, 50, 51]]
RESPONSES = [[11, 12, 2], [13, 14, 15, 16, 2], [17], [18, 19]]
CPU = torch.device("cpu")


@pytest.fixture(params=["opt", "qwen3"])
def model(request, tokenizer):
    model = spread(make_causal(FAMILIES[request.param], tokenizer, 1))
    # Without dropout.
    return model.eval()


EXAMPLES = Examples(PROMPTS, RESPONSES)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        ("fp32", 1e-4),
        pytest.param("bf16", 5e-2, marks=pytest.mark.gpu),
        pytest.param("fp16", 2e-2, marks=pytest.mark.gpu),
    ],
)
def test_loss_and_gradients_equal_those_of_a_cpu(dtype, tolerance, model, device):
    expected_loss, expected = loss_and_gradients(copy.deepcopy(model), CPU, EXAMPLES, 48)
    choices = acceleration.Acceleration(pad_to_multiple_of=64, prefetch=True)
    with configured(device.type == "cuda"), acceleration.using(choices):
        loss, grads = loss_and_gradients(model.to(DTYPES[dtype]), device, EXAMPLES, 48)
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert (grads - expected).norm() < tolerance * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True, scope="module")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("num_responses", [1, 2])
@pytest.mark.parametrize(
    ("attn_implementation", "dtype", "tolerance"),
    [
        ("sdpa", "bf16", GRADIENT_ERROR),
        ("auto", "bf16", GRADIENT_ERROR),
        ("auto", "fp32", 1e-2),
    ],
)
@pytest.mark.parametrize("name", KERNEL_MODELS)
def test_attention_kernels_equal_a_dense_mask_on_a_cpu(
    name,
    attn_implementation,
    dtype,
    tolerance,
    num_responses,
    compiled,
    device,
    tokenizer,
):
    placement = {"attn_implementation": attn_implementation, "compile": compiled}
    errors = kernel_errors(name, num_responses, tokenizer, dtype, **placement)
    assert errors["loss_error"] < tolerance / 50 and errors["gradient_error"] < tolerance


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_greedy_responses_equal_those_of_a_cpu(cuda_graphs, model, tokenizer, device):
    def sample():
        return sample_responses(model, PROMPTS, [tokenizer.eos_token_id], 40, 0, 4096, 2)

    expected = sample()
    model.to(device)
    with configured(device.type == "cuda", cuda_graphs=cuda_graphs):
        assert sample() == expected
