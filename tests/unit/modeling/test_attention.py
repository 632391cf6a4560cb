"""Attention kernels of packed sequences, compared with SDPA and a dense mask.

A CPU computes flex_attention without its fused kernel, in the forward pass and in the backward
pass, which torch refuses unless its check of the device is skipped. varlen_attn, which only a GPU
has, is replaced by a loop over its segments. tests/gpu runs the kernels themselves.
"""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention as torch_flex_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from snakechat.modeling import acceleration, attention
from snakechat.modeling.acceleration import Acceleration
from snakechat.modeling.attention import kernel_problem
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy
from snakechat.modeling.generation import sample_responses
from snakechat.modeling.loading import load_causal
from snakechat.modeling.lora import add_lora
from snakechat.modeling.models import checkpoint_activations, make_causal
from snakechat.modeling.packing import Segments, row_boundaries
from snakechat.modeling.saving import save_model
from snakechat.workflow.errors import InputError
from support.families import FAMILIES, WINDOWS, spread
from support.varlen import loop_over_segments

CPU = torch.device("cpu")
KINDS = ("opt", "qwen3", "gemma3_text", "mistral, window")
MODELS = {name: keys for name, keys in (FAMILIES | WINDOWS).items() if name in KINDS}
# Lengths of prompt and of two responses. Some rows are longer than the windows.
SHAPES = [(12, 9, 4), (5, 4, 2), (3, 2, 5), (1, 6, 1), (7, 1, 3), (4, 3, 3)]


def make_examples():
    random = np.random.default_rng(1)
    fields = [
        [random.integers(10, 300, shape[number]).tolist() for shape in SHAPES]
        for number in range(3)
    ]
    return Examples(*fields[:2]), Examples(*fields)


# One response of each row, and two that share its prompt.
EXAMPLES = dict(zip(("single", "pairs"), make_examples(), strict=True))


@pytest.fixture(autouse=True)
def _unregistered(monkeypatch):
    """The attention functions of transformers, which earlier tests may have replaced."""
    functions = {**AttentionInterface._global_mapping, "sdpa": sdpa_attention_forward}
    monkeypatch.setattr(AttentionInterface, "_global_mapping", functions)


@pytest.fixture
def choose(monkeypatch):
    """A function that chooses the kernel of a CPU; returns the kernels that were called."""
    calls = []
    monkeypatch.setattr(attention, "kernel_problem", lambda *_: None)
    monkeypatch.setattr(torch_flex_attention, "_validate_device", lambda *_: None)

    def record(name, function):
        def call(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        return call

    for name, function in (
        ("varlen_attn", loop_over_segments),
        ("flex_attention", attention.flex_attention),
        ("sdpa_attention_forward", attention.sdpa_attention_forward),
    ):
        monkeypatch.setattr(attention, name, record(name.partition("_")[0], function))

    def choose(implementation, **choices):
        monkeypatch.setattr(
            acceleration, "_current", Acceleration(attn_implementation=implementation, **choices)
        )
        return calls

    return choose


@pytest.fixture(params=MODELS)
def policy(request, tokenizer, tmp_path):
    # Loaded models have no dropout.
    save_model(make_causal(MODELS[request.param], tokenizer, 1), tokenizer, tmp_path)
    return Policy(spread(load_causal(tmp_path, "fp32", tokenizer)))


def loss_and_gradients(policy, examples, with_prompts=True):
    """The sum of all log-probabilities, and its gradients, over packed micro-batches."""
    policy.zero_grad()
    micro_batches = list(
        examples.micro_batches(np.arange(len(examples)), 60, True, CPU, with_prompts)
    )
    assert len(micro_batches) > 1
    loss = sum(policy(micro_batch.batch, return_sum=True) for micro_batch in micro_batches)
    loss.backward()
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    return loss.detach(), torch.cat([weight.grad.flatten() for weight in weights])


def assert_equal(actual, expected):
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=0)
    assert (actual[1] - expected[1]).norm() < 1e-5 * expected[1].norm()


@pytest.mark.parametrize(
    ("implementation", "rows", "kernel"),
    [
        ("flex", "single", "flex"),
        ("flex", "pairs", "flex"),
        ("varlen", "single", "varlen"),
        # transformers' own function.
        ("varlen", "pairs", None),
    ],
)
def test_losses_and_gradients_equal_those_of_a_dense_mask(
    policy, implementation, rows, kernel, choose
):
    expected = loss_and_gradients(policy, EXAMPLES[rows])
    calls = choose(implementation, pad_to_multiple_of=8)
    assert_equal(loss_and_gradients(policy, EXAMPLES[rows]), expected)
    assert {*calls} == ({kernel} if kernel else set())


@pytest.mark.parametrize(("rows", "kernel"), [("single", "varlen"), ("pairs", None)])
@pytest.mark.parametrize("policy", ["opt"], indirect=True)
def test_auto_takes_varlen_unless_responses_share_a_prompt(policy, rows, kernel, choose):
    expected = loss_and_gradients(policy, EXAMPLES[rows])
    calls = choose("auto")
    assert_equal(loss_and_gradients(policy, EXAMPLES[rows]), expected)
    assert {*calls} == ({kernel} if kernel else set())


@pytest.mark.parametrize("implementation", ["flex", "varlen"])
@pytest.mark.parametrize("policy", ["qwen3"], indirect=True)
def test_gradients_of_adapters_with_checkpointed_activations_are_equal(
    policy, implementation, choose
):
    add_lora(policy.model, 2, 4)
    spread(policy.model)
    expected = loss_and_gradients(policy, EXAMPLES["single"])
    checkpoint_activations(policy.model)
    calls = choose(implementation)
    assert_equal(loss_and_gradients(policy, EXAMPLES["single"]), expected)
    # Twice in each layer: the backward pass computes it again.
    assert {*calls} == {implementation}
    assert len(calls) % 4 == 0


@pytest.mark.parametrize("policy", ["opt"], indirect=True)
def test_a_model_samples_by_sdpa_after_a_batch_of_another_kernel(policy, choose):
    prompts = EXAMPLES["single"].prompts

    def sample():
        return sample_responses(policy.model, prompts, [2], 5, 0, 4096, 1)

    expected = sample()
    calls = choose("auto")
    loss_and_gradients(policy, EXAMPLES["single"])
    calls.clear()
    assert sample() == expected
    assert {*calls} == {"sdpa"}


# The comparisons above detect wrong masks.


def test_boundaries_are_those_of_rows_and_padding():
    row_ids = np.array([[1, 1, 2, 0, 0], [1, 1, 1, 1, 1], [1, 2, 2, 2, 0]])
    assert row_boundaries(row_ids).tolist() == [0, 2, 3, 5, 10, 11, 14, 15]


@pytest.mark.parametrize(
    ("kernel", "dtype", "head_dim", "problem"),
    [
        ("varlen", torch.bfloat16, 64, None),
        ("varlen", torch.float32, 64, "needs bf16 or fp16, and the model has float32"),
        ("varlen", torch.float16, 20, "and the model has 20"),
        ("flex", torch.bfloat16, 8, "and the model has 8"),
    ],
)
def test_kernels_name_what_a_model_lacks(kernel, dtype, head_dim, problem):
    actual = kernel_problem(kernel, CPU, dtype, head_dim)
    assert actual is None if problem is None else problem in actual


@pytest.mark.parametrize("implementation", ["varlen", "flex"])
@pytest.mark.parametrize("policy", ["opt"], indirect=True)
def test_an_unsupported_kernel_is_an_error_and_auto_takes_sdpa(
    policy, implementation, choose, monkeypatch
):
    expected = loss_and_gradients(policy, EXAMPLES["single"])
    choose(implementation)
    monkeypatch.setattr(attention, "kernel_problem", lambda *_: "needs another GPU")
    with pytest.raises(InputError, match=f"attn_implementation: {implementation} needs another"):
        loss_and_gradients(policy, EXAMPLES["single"])
    choose("auto")
    assert_equal(loss_and_gradients(policy, EXAMPLES["single"]), expected)


def test_shapes_and_masks_share_few_compiled_kernels(monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(
        attention, "flex_attention", torch.compile(attention.flex_attention, backend=counter)
    )
    random = np.random.default_rng(1)
    for _ in range(20):
        size, length = random.integers(1, 6), 128 * random.integers(1, 6)
        row_ids = torch.from_numpy(random.integers(1, 4, (size, length))).sort(dim=1).values
        mask = attention.packed_block_mask(Segments(row_ids, row_ids, None, length))
        mask = attention.window_block_mask(mask, row_ids, 9)
        states = torch.randn(size, 2, length, 16)
        with torch.no_grad():
            attention.packed_attention(None, states, states, states, mask)
    assert 1 < counter.frame_count <= 6
