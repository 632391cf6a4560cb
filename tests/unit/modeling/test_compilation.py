"""Compiled decoder layers compute what the layers compute, and change nothing else."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from snakechat.modeling import acceleration, logprobs
from snakechat.modeling.acceleration import compile_layers
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy
from snakechat.modeling.generation import HfSampler
from snakechat.modeling.loading import load_causal
from snakechat.modeling.models import choose_device
from snakechat.training.placed_models import make_engine
from snakechat.workflow.placement import Placement
from support.engines import SETTINGS
from support.families import FAMILIES
from support.passes import (
    CPU,
    assert_equal,
    loss_and_gradients,
    sample_responses,
    saved_policy,
)

pytestmark = pytest.mark.slow

PROMPTS, *RESPONSES = (
    [np.random.default_rng(field).integers(10, 300, 1 + row).tolist() for row in range(12)]
    for field in range(3)
)
EXAMPLES = Examples(PROMPTS, *RESPONSES)


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    torch.compiler.reset()
    logprobs.compiled.cache_clear()


@pytest.fixture(params=["opt"])
def policy(request, tokenizer, tmp_path):
    return saved_policy(FAMILIES[request.param], tokenizer, tmp_path)


@pytest.mark.parametrize("policy", ["opt", "gemma3_text"], indirect=True)
def test_losses_and_gradients_are_equal_and_layers_share_compiled_code(policy):
    expected = loss_and_gradients(policy, EXAMPLES)
    names = list(policy.state_dict())
    counter = CompileCounter()
    compile_layers(policy.model, counter)
    assert list(policy.state_dict()) == names
    assert_equal(loss_and_gradients(policy, EXAMPLES), expected)
    assert 1 <= counter.frame_count <= 4


def test_sampling_with_a_cache_compiles_nothing(policy):
    def sample():
        return sample_responses(policy.model.eval(), PROMPTS, HfSampler([2], 5, 0))

    expected = sample()
    counter = CompileCounter()
    compile_layers(policy.model, counter)
    assert sample() == expected
    assert counter.frame_count == 0


# Only inductor generates code for the CPU, which takes a minute.
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)]
)
def test_an_engine_trains_with_compiled_code(backend, policy, tokenizer, tmp_path, monkeypatch):
    compile_function = torch.compile

    def compile_for(function, **options):
        return compile_function(function, **options | {"backend": backend})

    monkeypatch.setattr(torch, "compile", compile_for)

    def losses(compile_setting):
        monkeypatch.setattr(acceleration, "_current", acceleration.current())
        placement = Placement(micro_batch_tokens=60, **compile_setting)
        choose_device(placement)
        module = Policy(load_causal(tmp_path, "fp32", tokenizer))
        engine = make_engine(module, SimpleNamespace(**SETTINGS), 1e-3, 3, placement)
        values = []
        for step in range(3):
            values.append(0.0)
            for micro_batch in EXAMPLES.micro_batches(np.arange(len(EXAMPLES)), True, CPU):
                # The output layer has a kernel for each of both.
                loss = engine(micro_batch.batch, return_sum=step != 1).sum() / -100
                engine.backward(loss, micro_batch.is_last)
                values[-1] += loss.item()
            engine.step()
        return values

    expected = losses({})
    assert expected[-1] < expected[0]
    assert losses({"compile": True}) == pytest.approx(expected, rel=1e-5)
