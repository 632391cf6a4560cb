"""Forward passes, gradients and generation on a GPU, compared with a CPU in fp32."""

import copy

import numpy as np
import pytest
import torch

from snakechat.modeling import acceleration
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy
from snakechat.modeling.generation import sample_responses
from snakechat.modeling.models import DTYPES, choose_device, make_causal
from support.families import FAMILIES, WINDOWS, spread

PROMPTS = [[0, 9, 8, 7, 6, 5, 40, 41], [0, 21], [0, 30, 31, 32], [0, 50, 51]]
RESPONSES = [[11, 12, 2], [13, 14, 15, 16, 2], [17], [18, 19]]
CPU = torch.device("cpu")


@pytest.fixture(params=["opt", "qwen3", "bloom"])
def model(request, tokenizer):
    model = spread(make_causal(FAMILIES[request.param], tokenizer, 1))
    # Without dropout.
    return model.eval()


@pytest.fixture
def configured(device, monkeypatch):
    """A function that configures the process for a placement on the device."""
    monkeypatch.setattr(acceleration, "_current", acceleration.current())

    def configure(**placement):
        choose_device({"gpus_per_node": int(device.type == "cuda"), **placement})

    return configure


EXAMPLES = Examples(PROMPTS, RESPONSES)


def loss_and_gradients(model, device, examples=EXAMPLES, micro_batch_tokens=48):
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


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        ("fp32", 1e-4),
        pytest.param("bf16", 5e-2, marks=pytest.mark.gpu),
        pytest.param("fp16", 2e-2, marks=pytest.mark.gpu),
    ],
)
def test_loss_and_gradients_equal_those_of_a_cpu(dtype, tolerance, model, device, configured):
    expected_loss, expected = loss_and_gradients(copy.deepcopy(model), CPU)
    configured(pad_to_multiple_of=64, prefetch=True)
    loss, grads = loss_and_gradients(model.to(DTYPES[dtype]), device)
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert (grads - expected).norm() < tolerance * expected.norm()


# Heads of 32 dimensions, and sequences of several blocks of a mask.
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 512}
KERNEL_MODELS = {
    "opt": {**FAMILIES["opt"], **WIDE, "word_embed_proj_dim": 64},
    "qwen3": {**FAMILIES["qwen3"], **WIDE, "num_key_value_heads": 1, "head_dim": 32},
    "mistral, window": {**WINDOWS["mistral, window"], **WIDE, "sliding_window": 50},
}


def long_examples(num_responses):
    random = np.random.default_rng(2)
    return Examples(
        *(
            [random.integers(10, 300, random.integers(1, 120)).tolist() for _ in range(24)]
            for _ in range(1 + num_responses)
        )
    )


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True, scope="module")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("num_responses", [1, 2])
@pytest.mark.parametrize(
    ("attn_implementation", "dtype", "tolerance"),
    [
        ("sdpa", "bf16", 5e-2),
        ("varlen", "bf16", 5e-2),
        ("flex", "bf16", 5e-2),
        ("flex", "fp32", 1e-2),
        ("auto", "bf16", 5e-2),
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
    configured,
):
    examples = long_examples(num_responses)
    model = spread(make_causal(KERNEL_MODELS[name], tokenizer, 1)).eval()
    expected_loss, expected = loss_and_gradients(copy.deepcopy(model), CPU, examples, 1024)
    configured(attn_implementation=attn_implementation, compile=compiled)
    loss, grads = loss_and_gradients(model.to(DTYPES[dtype]), device, examples, 1024)
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert (grads - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_greedy_responses_equal_those_of_a_cpu(cuda_graphs, model, tokenizer, device, configured):
    def sample():
        return sample_responses(model, PROMPTS, [tokenizer.eos_token_id], 40, 0, 4096, 2)

    expected = sample()
    configured(cuda_graphs=cuda_graphs)
    model.to(device)
    assert sample() == expected


@pytest.mark.gpu
def test_vllm_has_the_logprobs_of_training(tokenizer, tmp_path):
    pytest.importorskip("vllm", reason="needs vLLM, which is not among the requirements")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch finds none")
    from types import SimpleNamespace

    from snakechat.modeling.saving import save_model
    from snakechat.modeling.vllm_sampler import VllmSampler

    init = {**FAMILIES["opt"], "hidden_size": 128, "word_embed_proj_dim": 128}
    model = make_causal(init | {"num_attention_heads": 2}, tokenizer, 1).eval()
    save_model(model, tokenizer, tmp_path / "model")
    settings = SimpleNamespace(
        dtype="fp32",
        max_prompt_length=16,
        max_response_length=16,
        num_generations=1,
        temperature=1.0,
    )
    sampler = VllmSampler(settings, [tokenizer.eos_token_id], tmp_path / "model")
    sampler.update(model.to("cuda"))
    sampler.sample(PROMPTS)
    # All weights come back.
    sampler.sleep()
    sampler.update(model)
    responses, logprobs = sampler.sample(PROMPTS)
    sampler.close()
    policy = Policy(model)
    [micro_batch] = Examples(PROMPTS, *responses).micro_batches(
        np.arange(len(PROMPTS)), 4096, policy.supports_packing, model.device
    )
    with torch.no_grad():
        expected = policy(micro_batch.batch).tolist()
    actual = [value for row in micro_batch.rows for value in logprobs[0][row]]
    assert actual == pytest.approx(expected, abs=0.02)
