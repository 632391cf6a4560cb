"""Log-probabilities in chunks, compared with torch's log_softmax and its gradients."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from snakechat.modeling import forward, models
from snakechat.modeling.forward import sum_of_logprobs, token_logprobs
from snakechat.modeling.models import Acceleration, acceleration

TOKENS, VOCABULARY, DIMENSIONS = 7, 11, 5
# Tokens of a chunk of logits, and of a chunk in fp32: 3, 3 and 1, each in 2 and 1; all at once; all
# logits at once, in fp32 3, 3 and 1.
SIZES = [(3, 2), (100, 100), (100, 3)]


@pytest.fixture(params=SIZES)
def chunks(request, monkeypatch):
    """Set the tokens of a chunk of logits and of a chunk in fp32."""
    sizes = (size * VOCABULARY for size in request.param)
    monkeypatch.setattr(models, "_acceleration", chunked(*sizes))


def chunked(logits, fp32_logits=100):
    return Acceleration(chunk_logits=logits, fp32_chunk_logits=fp32_logits)


def layer(number=TOKENS, dtype=torch.float32, with_bias=True):
    """Hidden states, weight and bias of an output layer, and tokens."""
    random = torch.Generator().manual_seed(1)
    shapes = [(number, DIMENSIONS), (VOCABULARY, DIMENSIONS), (VOCABULARY,)]
    values = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
    hidden, weight, bias = (value.requires_grad_() for value in values)
    tokens = torch.randint(VOCABULARY, (number,), generator=random)
    return hidden, weight, bias if with_bias else None, tokens


def reference(hidden, weight, bias, tokens, temperature=1.0):
    """torch's log-probabilities [N] of the tokens in fp32, and entropies [N]."""
    hidden, weight, bias = (None if v is None else v.float() for v in (hidden, weight, bias))
    logits = functional.linear(hidden, weight, bias) / temperature
    entropies = torch.distributions.Categorical(logits=logits).entropy()
    return torch.log_softmax(logits, dim=1)[torch.arange(len(tokens)), tokens], entropies


def gradients_of(value, *inputs):
    return torch.autograd.grad(value, [each for each in inputs if each is not None])


def relative_error(actual, expected):
    """Norm of the difference, relative to the expected value."""
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.fixture(params=[False, True])
def compiled(request, chunks, monkeypatch):
    """Choose the functions that are compiled, as they are; test_attention.py compiles them."""
    choices = replace(acceleration(), compile=request.param)
    monkeypatch.setattr(models, "_acceleration", choices)
    monkeypatch.setattr(forward, "compiled", lambda function: function)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_values_and_gradients_equal_those_of_log_softmax(temperature, with_bias):
    *layer_of, tokens = layer(with_bias=with_bias)
    # Each token has a different gradient.
    factors = torch.linspace(-1, 2, TOKENS)
    actual, entropies = token_logprobs(*layer_of, tokens, temperature, return_entropies=True)
    expected, expected_entropies = reference(*layer_of, tokens, temperature)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(entropies, expected_entropies)
    assert not entropies.requires_grad
    pairs = [(factors @ actual, factors @ expected)]
    if temperature == 1:
        sums = sum_of_logprobs(*layer_of, tokens), reference(*layer_of, tokens)[0].sum()
        pairs.append(tuple(-3.0 * each for each in sums))
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs)
        gradients = (gradients_of(value, *layer_of) for value in (ours, theirs))
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("by", [token_logprobs, sum_of_logprobs])
@pytest.mark.usefixtures("chunks")
def test_bf16_states_have_fp32_logprobs_and_bf16_gradients(by):
    hidden, weight, bias, tokens = layer(dtype=torch.bfloat16)
    actual = by(hidden, weight, bias, tokens)
    expected, _ = reference(hidden, weight, bias, tokens)
    assert actual.dtype == torch.float32
    assert relative_error(actual.sum(), expected.sum()) < 0.01
    ours, theirs = (
        gradients_of(values.sum(), hidden, weight, bias) for values in (actual, expected)
    )
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == torch.bfloat16
        assert relative_error(our, their) < 0.02


@pytest.mark.parametrize("by", [token_logprobs, sum_of_logprobs])
def test_gradients_of_a_bf16_weight_are_summed_in_fp32(by, monkeypatch):
    monkeypatch.setattr(models, "_acceleration", chunked(VOCABULARY))
    hidden, weight, bias, tokens = layer(number=1, dtype=torch.bfloat16)
    single = gradients_of(by(hidden, weight, bias, tokens).sum(), weight, bias)
    # A sum in bf16 stops growing at 256 times the summand.
    inputs = hidden.detach().repeat(1024, 1), weight, bias, tokens.repeat(1024)
    repeated = gradients_of(by(*inputs).sum(), weight, bias)
    for gradient, total in zip(single, repeated, strict=True):
        assert relative_error(total, 1024 * gradient.float()) < 0.01


# Those of a sum are computed once.
@pytest.mark.parametrize(("by", "times"), [(token_logprobs, 2), (sum_of_logprobs, 1)])
def test_logits_exist_for_a_chunk_of_the_tokens(by, times, monkeypatch):
    sizes, linear = [], functional.linear

    def counted(hidden, *others):
        sizes.append(len(hidden))
        return linear(hidden, *others)

    monkeypatch.setattr(functional, "linear", counted)
    monkeypatch.setattr(models, "_acceleration", chunked(3 * VOCABULARY + 1))
    by(*layer()).sum().backward()
    assert sizes == [3, 3, 1] * times
