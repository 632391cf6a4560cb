"""Log-probabilities of tokens from hidden states, without the logits of a whole batch.

The output layer is the widest part of a language model: with a vocabulary of 50,000 the logits of
8,000 tokens take 1.6 GB, several times over in a plain loss. Here they exist for a chunk of the
tokens at a time, and gradients are computed directly from the chunk: with
p = softmax(logits / temperature) of a token's state,
d log p[token] / d logits = (onehot(token) - p) / temperature.

Shapes: N tokens, V entries of the vocabulary, D dimensions of a state; n tokens of a chunk of
logits, m of a chunk in fp32.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from snakechat.modeling import acceleration
from snakechat.modeling.acceleration import compile_versions

# Logits that exist at a time: 64 MB in 16 bits.
CHUNK_LOGITS = 1 << 25
# Logits that exist in fp32 at a time: 8 MB, which fit a CPU's caches.
FP32_CHUNK_LOGITS = 1 << 21
# On a GPU, both: 256 MB in 16 bits and 512 MB in fp32. The product with the output layer is then
# large enough for the whole GPU: 2,670 tokens of OPT's vocabulary.
GPU_CHUNK_LOGITS = 1 << 27

# Of hidden states [N, D], weight [V, D] and bias [V]; None where none is needed.
Gradients = tuple[torch.Tensor | None, ...]


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    temperature: float = 1.0,
    return_entropies: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability [N] of each token in fp32.

    The backward pass computes the logits a second time.

    Args:
        hidden: [N, D]. weight: [V, D]. bias: [V] or None. tokens: [N].
        return_entropies: also return the entropy [N] of each distribution, without gradient.
    """
    logprobs, entropies = _TokenLogprobs.apply(
        hidden, weight, bias, tokens, temperature, return_entropies
    )
    return (logprobs, entropies) if return_entropies else logprobs


def sum_of_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tokens: torch.Tensor
) -> torch.Tensor:
    """Return the sum of token_logprobs.

    Computes the gradients in the forward pass, and therefore the logits only once.
    """
    if not torch.is_grad_enabled():
        logprobs = token_logprobs(hidden, weight, bias, tokens)
        assert isinstance(logprobs, torch.Tensor)
        return logprobs.sum()
    return _SumOfLogprobs.apply(hidden, weight, bias, tokens)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        temperature: float,
        return_entropies: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(hidden, weight, bias, tokens)
        ctx.temperature = temperature
        logprobs = torch.empty(len(tokens), device=hidden.device)
        entropies = torch.empty_like(logprobs)
        for chunk, logits in logit_chunks(hidden, weight, bias):
            logprobs[chunk], entropies[chunk] = _evaluate(
                logits, tokens[chunk], temperature, return_entropies
            )
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, tokens = ctx.saved_tensors
        factors = grad_outputs[0][:, None] / ctx.temperature
        _, gradients = _sum_and_gradients(
            hidden, weight, bias, tokens, ctx.needs_input_grad, ctx.temperature, factors
        )
        return *_scaled(gradients, hidden.dtype), None, None, None


class _SumOfLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        total, ctx.gradients = _sum_and_gradients(
            hidden, weight, bias, tokens, ctx.needs_input_grad
        )
        ctx.dtype = hidden.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor | None, ...]:
        gradients = _scaled(ctx.gradients, ctx.dtype, grad_outputs[0])
        # The caller may keep the loss, which would keep the gradients in memory.
        del ctx.gradients
        return *gradients, None


def _sum_and_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    needs_grad: tuple[bool, ...],
    temperature: float = 1.0,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Gradients]:
    """Return the sum of the log-probabilities, and the gradients of the sum times factors.

    Args:
        needs_grad: Which of hidden states, weight and bias require a gradient. The weight does not
            if only adapters are trained.
        factors: [N, 1], of each log-probability.
    """
    of_hidden = torch.empty_like(hidden) if needs_grad[0] else None
    of_weight, of_bias = (
        # A sum in bf16 would lose what later chunks add.
        torch.zeros_like(each, dtype=torch.float32) if each is not None and needed else None
        for each, needed in ((weight, needs_grad[1]), (bias, needs_grad[2]))
    )
    total = torch.zeros((), device=hidden.device)
    for chunk, logits in logit_chunks(hidden, weight, bias):
        logprobs, negative = _differentiate(
            logits, tokens[chunk], temperature, None if factors is None else factors[chunk]
        )
        total += logprobs.sum()
        if of_bias is not None:
            of_bias -= negative.sum(dim=0, dtype=torch.float32)
        if of_hidden is not None:
            of_hidden[chunk] = -(negative @ weight)
        if of_weight is not None:
            of_weight -= negative.T @ hidden[chunk]
    return total, (of_hidden, of_weight, of_bias)


def _scaled(
    gradients: Gradients, dtype: torch.dtype, factor: torch.Tensor | float = 1.0
) -> Gradients:
    return tuple(None if each is None else (each * factor).to(dtype) for each in gradients)


def logit_chunks(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield chunks of the tokens and their logits [n, V]."""
    num_logits = GPU_CHUNK_LOGITS if weight.is_cuda else CHUNK_LOGITS
    size = max(1, num_logits // len(weight))
    for start in range(0, len(hidden), size):
        chunk = slice(start, min(start + size, len(hidden)))
        yield chunk, functional.linear(hidden[chunk], weight, bias)


def _evaluate(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float, return_entropies: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities [n] of a chunk, and its entropies [n] if they are needed."""
    if acceleration.current().compile:
        return compiled(logprobs_and_entropies)(logits, tokens, temperature)
    logprobs = torch.empty(len(logits), device=logits.device)
    entropies = torch.empty_like(logprobs)
    for rows, _, table in fp32_logprobs(logits, temperature):
        logprobs[rows] = _select_tokens(table, tokens[rows])
        if return_entropies:
            entropies[rows] = _entropies(table)
    return logprobs, entropies


def _differentiate(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    temperature: float = 1.0,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities [n] of a chunk, and their negative gradients [n, V].

    The gradients, which may take the place of the logits, are multiplied by factors [n, 1].
    """
    if acceleration.current().compile:
        return compiled(logprobs_and_gradients)(logits, tokens, temperature, factors)
    logprobs = torch.empty(len(logits), device=logits.device)
    for rows, chunk_logits, table in fp32_logprobs(logits, temperature):
        logprobs[rows] = _select_tokens(table, tokens[rows])
        table.exp_()
        table[torch.arange(len(table), device=table.device), tokens[rows]] -= 1
        chunk_logits.copy_(table if factors is None else table.mul_(factors[rows]))
    return logprobs, logits


def fp32_logprobs(
    logits: torch.Tensor, temperature: float
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield smaller chunks, views of their logits [m, V], and log-probabilities [m, V] in fp32.

    The log-probabilities may be overwritten and are valid until the next chunk.
    """
    size = len(logits) if logits.is_cuda else max(1, FP32_CHUNK_LOGITS // logits.shape[1])
    buffer = torch.empty(min(size, len(logits)), logits.shape[1], device=logits.device)
    for start in range(0, len(logits), max(size, 1)):
        chunk_logits = logits[start : start + size]
        table = buffer[: len(chunk_logits)].copy_(chunk_logits)
        if temperature != 1:
            table /= temperature
        torch.log_softmax(table, dim=1, out=table)
        yield slice(start, start + len(chunk_logits)), chunk_logits, table


def _select_tokens(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the entry [n] of each token in its row of a table [n, V]."""
    return table.gather(1, tokens[:, None]).squeeze(1)


def _entropies(table: torch.Tensor) -> torch.Tensor:
    """Return the entropies [n] of log-probabilities [n, V]."""
    return -torch.linalg.vecdot(table.exp(), table)


@functools.cache
def compiled(function: Callable[..., Any]) -> Any:
    """Return one of the functions below as one kernel, which reads the logits [n, V] once."""
    return compile_versions(function, dynamic=True)


def logprobs_and_entropies(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what _evaluate returns."""
    table = (logits.float() / temperature).log_softmax(dim=1)
    return _select_tokens(table, tokens), _entropies(table)


def logprobs_and_gradients(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float, factors: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what _differentiate returns."""
    table = (logits.float() / temperature).log_softmax(dim=1)
    is_token = torch.arange(logits.shape[1], device=logits.device) == tokens[:, None]
    gradients = table.exp() - is_token.float()
    if factors is not None:
        gradients = gradients * factors
    return _select_tokens(table, tokens), gradients.to(logits.dtype)
