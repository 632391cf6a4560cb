"""Attention without a dense mask and compiled layers, compared with SDPA and a dense mask.

varlen_attn, which only a GPU has, is replaced by a loop over its segments. Responses that share a
prompt have the kernel of a CPU in the place of FlashAttention. tests/gpu runs the kernels of a GPU.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from snakechat.modeling import attention, forward, models
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy
from snakechat.modeling.generation import Sampler
from snakechat.modeling.loading import add_lora, load_causal
from snakechat.modeling.models import Acceleration, checkpoint_activations, choose_device
from snakechat.training.placed_models import make_engine
from snakechat.workflow.processes import Placement
from support.engines import SETTINGS
from support.families import FAMILIES, WINDOWS, spread
from support.passes import (
    CPU,
    assert_equal,
    loss_and_gradients,
    sample_responses,
    saved_policy,
)
from support.varlen import loop_over_segments

KINDS = ("opt", "qwen3", "gemma3_text", "mistral, window")
MODELS = {name: keys for name, keys in (FAMILIES | WINDOWS).items() if name in KINDS}
# Lengths of prompt and of three responses. Some rows are longer than the windows.
SHAPES = [(12, 9, 4, 1), (5, 4, 2, 0), (3, 2, 5, 7), (1, 6, 1, 1), (7, 1, 3, 5), (4, 3, 3, 20)]
RANDOM = np.random.default_rng(1)
PROMPTS, *RESPONSES = (
    [RANDOM.integers(10, 300, shape[number]).tolist() for shape in SHAPES] for number in range(4)
)
# One response of each row, and several that share its prompt.
EXAMPLES = {"single": Examples(PROMPTS, RESPONSES[0]), "shared": Examples(PROMPTS, *RESPONSES)}
EXAMPLES["pairs"] = Examples(PROMPTS, *RESPONSES[:2])


@pytest.fixture(autouse=True)
def _unregistered(monkeypatch):
    """The attention functions of transformers, which earlier tests may have replaced."""
    functions = {**AttentionInterface._global_mapping, "sdpa": sdpa_attention_forward}
    monkeypatch.setattr(AttentionInterface, "_global_mapping", functions)


@pytest.fixture
def allow_varlen(monkeypatch):
    """A function that has a CPU choose as a GPU does; returns the kernels that were called."""
    calls = []

    def record(name, function):
        # torch compiles no loop over segments: it would do so for each number of them.
        @torch.compiler.disable
        def call(*args, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        return call

    for name, function in (
        ("varlen_attn", loop_over_segments),
        ("shared_prompt_attention", attention.shared_prompt_attention),
    ):
        monkeypatch.setattr(attention, name, record(name.partition("_")[0], function))

    def allow(is_supported=True, **choices):
        monkeypatch.setattr(attention, "supports_varlen", lambda *_: is_supported)
        choices = Acceleration(attn_implementation="auto", **choices)
        monkeypatch.setattr(models, "_acceleration", choices)
        return calls

    return allow


@pytest.fixture
def compile_by(monkeypatch):
    """A function that sets the backend of torch.compile."""
    compile_function = torch.compile

    def set_backend(backend):
        def compile_for(function, **options):
            return compile_function(function, **options | {"backend": backend})

        monkeypatch.setattr(torch, "compile", compile_for)

    return set_backend


@pytest.fixture(params=MODELS)
def policy(request, tokenizer, tmp_path):
    return saved_policy(MODELS[request.param], tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("rows", "is_supported"),
    [("single", True), ("pairs", True), ("shared", True), ("single", False)],
)
def test_losses_and_gradients_equal_those_of_a_dense_mask(policy, rows, is_supported, allow_varlen):
    expected = loss_and_gradients(policy, EXAMPLES[rows])
    calls = allow_varlen(is_supported, pad_to_multiple_of=8)
    assert_equal(loss_and_gradients(policy, EXAMPLES[rows]), expected)
    has_window = getattr(policy.model.config, "sliding_window", None)
    if not is_supported or (rows != "single" and has_window):
        # transformers' own function, and a dense mask.
        assert not calls
    else:
        assert {*calls} == {"varlen" if rows == "single" else "shared"}


@pytest.mark.parametrize("policy", ["opt", "qwen3"], indirect=True)
def test_long_responses_that_share_a_prompt_have_no_dense_mask_on_a_cpu(policy, monkeypatch):
    expected = loss_and_gradients(policy, EXAMPLES["shared"])
    monkeypatch.setattr(models, "_acceleration", Acceleration(min_response=1))
    # Nothing makes one.
    monkeypatch.setattr(attention, "packed_attention_mask", None)
    assert_equal(loss_and_gradients(policy, EXAMPLES["shared"]), expected)
    with pytest.raises(TypeError):
        loss_and_gradients(policy, EXAMPLES["single"])


@pytest.mark.parametrize("policy", ["qwen3"], indirect=True)
def test_gradients_of_adapters_with_checkpointed_activations_are_equal(policy, allow_varlen):
    add_lora(policy.model, 2, 4)
    spread(policy.model)
    expected = loss_and_gradients(policy, EXAMPLES["single"])
    checkpoint_activations(policy.model)
    calls = allow_varlen()
    assert_equal(loss_and_gradients(policy, EXAMPLES["single"]), expected)
    assert {*calls} == {"varlen"}


# Compiled decoder layers.


@pytest.fixture
def forget_compiled_code():
    torch.compiler.reset()
    forward.compiled.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("forget_compiled_code")
@pytest.mark.parametrize("policy", ["opt", "gemma3_text"], indirect=True)
def test_losses_and_gradients_are_equal_and_layers_share_compiled_code(policy, compile_by):
    expected = loss_and_gradients(policy, EXAMPLES["shared"])
    names = list(policy.state_dict())
    counter = CompileCounter()
    compile_by(counter)
    models.compile_layers(policy.model)
    assert list(policy.state_dict()) == names
    assert_equal(loss_and_gradients(policy, EXAMPLES["shared"]), expected)
    assert 1 <= counter.frame_count <= 4
    # Passes with a cache are not compiled.
    counter.clear()
    sample_responses(policy.model.eval(), PROMPTS, Sampler([2], 5, 0))
    assert counter.frame_count == 0


@pytest.mark.slow
@pytest.mark.usefixtures("forget_compiled_code")
@pytest.mark.parametrize("policy", ["opt"], indirect=True)
def test_an_engine_trains_with_compiled_code(policy, tokenizer, tmp_path, monkeypatch, compile_by):
    compile_by("aot_eager")
    examples = EXAMPLES["shared"]

    def losses(compile_setting):
        monkeypatch.setattr(models, "_acceleration", models.acceleration())
        placement = Placement(micro_batch_tokens=60, **compile_setting)
        choose_device(placement)
        module = Policy(load_causal(tmp_path, "fp32", tokenizer))
        engine = make_engine(module, SimpleNamespace(**SETTINGS), 1e-3, 3, placement)
        values = []
        for step in range(3):
            values.append(0.0)
            for micro_batch in examples.micro_batches(np.arange(len(examples)), True, CPU):
                # The output layer has a kernel for each of both.
                loss = engine(micro_batch.batch, return_sum=step != 1).sum() / -100
                engine.backward(loss, micro_batch.is_last)
                values[-1] += loss.item()
            engine.step()
        return values

    expected = losses({})
    assert expected[-1] < expected[0]
    assert losses({"compile": True}) == pytest.approx(expected, rel=1e-5)
