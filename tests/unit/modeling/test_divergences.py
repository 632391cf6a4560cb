"""Divergences from the most probable tokens of a teacher, by hand and compared with autograd."""

from math import log

import pytest
import torch
from torch.nn import functional

from snakechat.modeling import logprobs
from snakechat.modeling.divergences import TopLogprobs, sum_of_divergences, top_logprobs

TOKENS, VOCABULARY, DIMENSIONS = 7, 11, 5


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of 3, 3 and 1 tokens, in fp32 of 2 and 1."""
    monkeypatch.setattr(logprobs, "CHUNK_LOGITS", 3 * VOCABULARY)
    monkeypatch.setattr(logprobs, "FP32_CHUNK_LOGITS", 2 * VOCABULARY)


def student(probabilities):
    """An output layer whose only state has these probabilities."""
    logits = torch.tensor([probabilities]).log().requires_grad_()
    return logits, torch.eye(len(probabilities)), None


def teacher(probabilities, k):
    top = torch.tensor([probabilities]).topk(k)
    return TopLogprobs(top.indices, top.values.log())


@pytest.mark.parametrize(
    ("k", "expected", "gradient"),
    [
        # p = (1/2, rest 1/2), q = (1/4, rest 3/4): the rest keeps its proportions, 1 : 2.
        (1, log(2) / 2 + log(2 / 3) / 2, [-1 / 4, 1 / 4 * 1 / 3, 1 / 2 * 1 / 3]),
        # p = (1/2, 3/8, rest 1/8), q = (1/4, 1/4, rest 1/2).
        (
            2,
            log(2) / 2 + 3 / 8 * log(3 / 2) + log(1 / 4) / 8,
            [-1 / 4, 1 / 4 - 3 / 8, 1 / 2 - 1 / 8],
        ),
    ],
)
def test_a_divergence_by_hand(k, expected, gradient):
    hidden, weight, bias = student([1 / 4, 1 / 4, 1 / 2])
    loss = sum_of_divergences(hidden, weight, bias, teacher([1 / 2, 3 / 8, 1 / 8], k))
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert hidden.grad[0].tolist() == pytest.approx(gradient, abs=1e-6)


def layer(seed):
    """Hidden states, weight and bias of an output layer."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(TOKENS, DIMENSIONS), (VOCABULARY, DIMENSIONS), (VOCABULARY,)]
    return [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]


def plain_divergences(hidden, weight, bias, top):
    """The sum of KL(p || q) over the k tokens and the rest, by autograd."""
    student = functional.linear(hidden, weight, bias).log_softmax(dim=1).double()
    p, q = top.logprobs.double().exp(), student.gather(1, top.tokens).exp()
    p, q = (torch.cat([x, 1 - x.sum(dim=1, keepdim=True)], dim=1) for x in (p, q))
    return (p * (p / q).log()).sum()


@pytest.mark.parametrize("k", [1, 4, 8])
def test_values_and_gradients_equal_those_of_autograd(k):
    inputs = layer(1)
    with torch.no_grad():
        top = top_logprobs(*layer(2), k)
    loss = sum_of_divergences(*inputs, top)
    expected = plain_divergences(*inputs, top)
    torch.testing.assert_close(loss, expected.float())
    # The caller may scale the loss.
    found, plain = (torch.autograd.grad(2 * each, inputs) for each in (loss, expected))
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(sum_of_divergences(*inputs, top), loss.detach())


def test_with_the_whole_vocabulary_it_is_the_kl():
    inputs = layer(1)
    with torch.no_grad():
        top = top_logprobs(*layer(2), VOCABULARY)
        ours, theirs = (functional.linear(*each).log_softmax(dim=1) for each in (inputs, layer(2)))
    loss = sum_of_divergences(*inputs, top)
    expected = functional.kl_div(ours, theirs, reduction="sum", log_target=True)
    torch.testing.assert_close(loss.detach(), expected)


def test_a_rest_that_underflows_stays_finite():
    hidden = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    loss = sum_of_divergences(hidden, torch.eye(3), None, teacher([0.5, 0.3, 0.2], 1))
    loss.backward()
    assert loss.isfinite() and hidden.grad.isfinite().all()


def test_the_most_probable_tokens_come_first():
    top = top_logprobs(*(each.detach() for each in layer(1)), 4)
    expected = functional.linear(*layer(1)).log_softmax(dim=1).topk(4)
    assert torch.equal(top.tokens, expected.indices)
    torch.testing.assert_close(top.logprobs, expected.values.detach())
