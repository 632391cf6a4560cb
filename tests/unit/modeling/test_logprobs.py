"""Log-probabilities in chunks, against torch's own and its gradients."""

from math import log
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from snakechat.modeling import logprobs
from snakechat.modeling.logprobs import sum_of_logprobs, token_logprobs

TOKENS, WORDS, UNITS = 7, 11, 5
# Tokens in a chunk, and in a table: chunks of 3, 3 and 1, in tables of 2 and 1; one for each; all
# at once; all in a chunk of tables of 3, 3 and 1.
SIZES = [(3, 2), (1, 1), (100, 100), (100, 3)]


@pytest.fixture(params=SIZES)
def chunks(request, monkeypatch):
    """How many tokens there are in a chunk, and in a table."""
    for name, size in zip(("CHUNK_LOGITS", "TABLE_LOGITS"), request.param, strict=True):
        monkeypatch.setattr(logprobs, name, size * WORDS)
    return request.param


@pytest.fixture
def rows(monkeypatch):
    """How many tokens had logits each time that some were made."""
    made = []

    def linear(hidden, weight, bias):
        made.append(len(hidden))
        return functional.linear(hidden, weight, bias)

    monkeypatch.setattr(logprobs, "functional", SimpleNamespace(linear=linear))
    return made


@pytest.fixture
def gradients(monkeypatch):
    """The gradients that were made."""
    made = []

    class Kept(logprobs._Gradients):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(logprobs, "_Gradients", Kept)
    return made


def layer(number=TOKENS, dtype=torch.float32, with_bias=True):
    """States, weight and bias of an output layer, and tokens."""
    random = torch.Generator().manual_seed(1)
    shapes = [(number, UNITS), (WORDS, UNITS), (WORDS,)]
    values = [torch.randn(shape, generator=random).to(dtype) for shape in shapes]
    hidden, weight, bias = (value.requires_grad_() for value in values)
    tokens = torch.randint(WORDS, (number,), generator=random)
    return hidden, weight, bias if with_bias else None, tokens


def tables(hidden, weight, bias, temperature=1.0):
    """What torch says of the whole vocabulary [N, V], in fp32."""
    hidden, weight, bias = (None if v is None else v.float() for v in (hidden, weight, bias))
    return torch.log_softmax(functional.linear(hidden, weight, bias) / temperature, dim=1)


def plain(hidden, weight, bias, tokens, temperature=1.0):
    return tables(hidden, weight, bias, temperature)[torch.arange(len(tokens)), tokens]


def slopes_of(value, *inputs):
    return torch.autograd.grad(value, [each for each in inputs if each is not None])


def distance(found, expected):
    """Norm of the difference, relative."""
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def test_logprobs_and_entropies_by_hand():
    # Probabilities 1/2, 1/4, 1/4, and half as hot, when they are squared, 4/6, 1/6, 1/6.
    hidden, weight = torch.ones(2, 1), torch.tensor([[1 / 2], [1 / 4], [1 / 4]]).log()
    tokens = torch.tensor([0, 2])
    found, entropies = token_logprobs(hidden, weight, None, tokens, entropies=True)
    assert found.tolist() == pytest.approx([log(1 / 2), log(1 / 4)])
    assert entropies.tolist() == pytest.approx([1.5 * log(2)] * 2)
    found, entropies = token_logprobs(hidden, weight, None, tokens, 0.5, entropies=True)
    assert found.tolist() == pytest.approx([log(4 / 6), log(1 / 6)])
    assert entropies.tolist() == pytest.approx([log(6) - 4 / 6 * log(4)] * 2)
    assert sum_of_logprobs(hidden, weight, None, tokens).item() == pytest.approx(log(1 / 8))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_values_and_gradients_are_those_of_log_softmax(chunks, temperature, with_bias):
    hidden, weight, bias, tokens = layer(with_bias=with_bias)
    # Each token's log-probability matters differently.
    factors = torch.linspace(-1, 2, TOKENS)
    found = token_logprobs(hidden, weight, bias, tokens, temperature)
    expected = plain(hidden, weight, bias, tokens, temperature)
    torch.testing.assert_close(found, expected)
    ours = slopes_of(factors @ found, hidden, weight, bias)
    theirs = slopes_of(factors @ expected, hidden, weight, bias)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_sum_and_its_gradients_are_those_of_log_softmax(chunks, with_bias):
    hidden, weight, bias, tokens = layer(with_bias=with_bias)
    found, expected = (by(hidden, weight, bias, tokens) for by in (sum_of_logprobs, plain))
    expected = expected.sum()
    torch.testing.assert_close(found, expected)
    ours, theirs = (slopes_of(-3.0 * s, hidden, weight, bias) for s in (found, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_entropies_are_those_of_torch_and_have_no_gradient(chunks, temperature):
    hidden, weight, bias, tokens = layer()
    found, entropies = token_logprobs(hidden, weight, bias, tokens, temperature, entropies=True)
    logits = tables(hidden, weight, bias, temperature)
    torch.testing.assert_close(entropies, torch.distributions.Categorical(logits=logits).entropy())
    assert not entropies.requires_grad
    # Those of the log-probabilities are as they were.
    without = token_logprobs(hidden, weight, bias, tokens, temperature)
    assert torch.equal(found, without)
    ours, theirs = (slopes_of(values.sum(), hidden, weight, bias) for values in (found, without))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("summed", [True, False])
def test_gradients_are_what_small_steps_change(summed):
    def value(*inputs):
        if summed:
            return sum_of_logprobs(*inputs, tokens).item()
        return token_logprobs(*inputs, tokens, 0.7).sum().item()

    *inputs, tokens = layer(number=2)
    by = sum_of_logprobs(*inputs, tokens) if summed else token_logprobs(*inputs, tokens, 0.7).sum()
    for number, slopes in enumerate(slopes_of(by, *inputs)):
        for place, slope in enumerate(slopes.flatten().tolist()):
            moved = []
            for move in (0.01, -0.01):
                changed = [each.detach().clone() for each in inputs]
                changed[number].view(-1)[place] += move
                moved.append(value(*changed))
            assert (moved[0] - moved[1]) / 0.02 == pytest.approx(slope, abs=2e-3)


@pytest.mark.parametrize("by", [token_logprobs, sum_of_logprobs])
def test_no_tokens_have_gradients_of_zero(by):
    hidden, weight, bias, tokens = layer(number=0)
    found = by(hidden, weight, bias, tokens).sum()
    assert found.item() == 0
    slopes = slopes_of(found, hidden, weight, bias)
    assert [tuple(slope.shape) for slope in slopes] == [(0, UNITS), (WORDS, UNITS), (WORDS,)]
    assert not any(slope.any() for slope in slopes)


# In 16 bits.


@pytest.mark.parametrize("by", [token_logprobs, sum_of_logprobs])
def test_bf16_states_have_fp32_logprobs_and_bf16_gradients(chunks, by):
    hidden, weight, bias, tokens = layer(dtype=torch.bfloat16)
    found, expected = (each(hidden, weight, bias, tokens) for each in (by, plain))
    assert found.dtype == torch.float32
    assert distance(found.sum(), expected.sum()) < 0.01
    ours, theirs = (slopes_of(values.sum(), hidden, weight, bias) for values in (found, expected))
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == torch.bfloat16
        assert distance(our, their) < 0.02


@pytest.mark.parametrize("by", [token_logprobs, sum_of_logprobs])
def test_what_many_chunks_add_to_a_bf16_weight_is_not_lost(by, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", WORDS)
    hidden, weight, bias, tokens = layer(number=1, dtype=torch.bfloat16)
    once = slopes_of(by(hidden, weight, bias, tokens).sum(), weight, bias)
    # A sum in bf16 stays where it is at 256 times what is added.
    inputs = hidden.detach().repeat(1024, 1), weight, bias, tokens.repeat(1024)
    often = slopes_of(by(*inputs).sum(), weight, bias)
    for one, all_of_them in zip(once, often, strict=True):
        assert distance(all_of_them, 1024 * one.float()) < 0.01


# What is made, and what is not.


def test_logits_exist_for_a_chunk_of_the_tokens(rows, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 3 * WORDS + 1)
    hidden, weight, bias, tokens = layer()
    found = token_logprobs(hidden, weight, bias, tokens, entropies=True)[0]
    assert rows == [3, 3, 1]
    found.sum().backward()
    assert rows == [3, 3, 1] * 2


def test_a_sum_makes_logits_once(rows, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 3 * WORDS)
    hidden, weight, bias, tokens = layer()
    sum_of_logprobs(hidden, weight, bias, tokens).backward()
    assert rows == [3, 3, 1]


def test_a_chunk_has_a_token_however_many_words_there_are(rows, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 1)
    token_logprobs(*layer())
    assert rows == [1] * TOKENS


@pytest.mark.parametrize("by", [token_logprobs, sum_of_logprobs])
def test_without_gradients_none_are_made(by, gradients):
    inputs = layer()
    with torch.no_grad():
        found = by(*inputs)
    assert not found.requires_grad
    assert gradients == []
    torch.testing.assert_close(found.sum(), plain(*inputs).sum())


@pytest.mark.parametrize("by", [token_logprobs, sum_of_logprobs])
@pytest.mark.parametrize("frozen", range(3))
def test_what_is_frozen_has_no_gradient_and_others_have_the_same(frozen, by, gradients):
    *inputs, tokens = layer()
    expected = list(slopes_of(by(*inputs, tokens).sum(), *inputs))
    gradients.clear()
    inputs[frozen].requires_grad_(False)
    by(*inputs, tokens).sum().backward()
    [made] = gradients
    kept = [made.of_hidden, made.of_weight, made.of_bias]
    assert [slopes is None for slopes in kept] == [number == frozen for number in range(3)]
    for number, each in enumerate(inputs):
        if number != frozen:
            assert torch.equal(each.grad, expected[number])
