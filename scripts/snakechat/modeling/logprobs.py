"""Log-probabilities of tokens from hidden states, without the logits of a whole batch.

The output layer is the widest thing in a language model: at a vocabulary of 50,000 the logits of
8,000 tokens are 1.6 GB, several times over in a plain loss. Here they exist for a chunk of the
tokens at a time, and gradients come straight from the chunk: with p = softmax(logits / temperature)
of a token's state, d log p[token] / d logits = (onehot(token) - p) / temperature.

Shapes: N tokens, V entries of the vocabulary, D units of a state.
"""

import torch
from torch.nn import functional

# Logits that exist at once: 64 MB in 16 bits.
CHUNK_LOGITS = 1 << 25
# Those of them that are in fp32 at once: 8 MB, which stay in a CPU's caches. A GPU takes them all.
TABLE_LOGITS = 1 << 21


def token_logprobs(hidden, weight, bias, tokens, temperature=1.0, entropies=False):
    """Log-probability [N] of each token (fp32), and with entropies that of what it was drawn from.

    hidden: [N, D]; weight: [V, D]; bias: [V] or None; tokens: [N]. Backward makes the logits a
    second time; entropies [N] have no gradient.
    """
    logprobs, spread = _TokenLogprobs.apply(hidden, weight, bias, tokens, temperature, entropies)
    return (logprobs, spread) if entropies else logprobs


def sum_of_logprobs(hidden, weight, bias, tokens):
    """The sum of token_logprobs, whose gradients are made along with it: logits are made once."""
    if not torch.is_grad_enabled():
        return token_logprobs(hidden, weight, bias, tokens).sum()
    return _SumOfLogprobs.apply(hidden, weight, bias, tokens)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, tokens, temperature, with_entropies):
        ctx.save_for_backward(hidden, weight, bias, tokens)
        ctx.temperature = temperature
        logprobs = torch.empty(len(tokens), device=hidden.device)
        entropies = torch.empty_like(logprobs) if with_entropies else None
        for part, logits in _chunks(hidden, weight, bias):
            for rows, _, table in _tables(part, logits, temperature):
                logprobs[rows] = _picked(table, tokens[rows])
                if with_entropies:
                    entropies[rows] = -torch.linalg.vecdot(table.exp(), table)
        if with_entropies:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, slopes, _):
        hidden, weight, bias, tokens = ctx.saved_tensors
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
        for part, logits in _chunks(hidden, weight, bias):
            for rows, some, table in _tables(part, logits, ctx.temperature):
                _into_slopes(table, tokens[rows])
                some.copy_(table.mul_(slopes[rows, None] / ctx.temperature))
            gradients.add(part, logits)
        return *gradients.times(1.0), None, None, None


class _SumOfLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, tokens):
        ctx.gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
        total = torch.zeros((), device=hidden.device)
        for part, logits in _chunks(hidden, weight, bias):
            for rows, some, table in _tables(part, logits):
                total += _picked(table, tokens[rows]).sum()
                _into_slopes(table, tokens[rows])
                some.copy_(table)
            ctx.gradients.add(part, logits)
        return total

    @staticmethod
    def backward(ctx, slope):
        found = ctx.gradients.times(slope)
        # A loss that its caller still holds would hold them too.
        del ctx.gradients
        return *found, None


def _chunks(hidden, weight, bias):
    """Parts of the tokens, and their logits [n, V]."""
    size = max(1, CHUNK_LOGITS // len(weight))
    for start in range(0, len(hidden), size):
        part = slice(start, min(start + size, len(hidden)))
        yield part, functional.linear(hidden[part], weight, bias)


def _tables(part, logits, temperature=1.0):
    """Parts of a part, their logits [m, V], and log-probabilities [m, V] in fp32, which may be
    written over and last until the next.
    """
    size = len(logits) if logits.is_cuda else max(1, TABLE_LOGITS // logits.shape[1])
    tables = torch.empty(min(size, len(logits)), logits.shape[1], device=logits.device)
    start = part.start
    for some in logits.split(size):
        table = tables[: len(some)].copy_(some)
        if temperature != 1:
            table /= temperature
        torch.log_softmax(table, dim=1, out=table)
        yield slice(start, start + len(some)), some, table
        start += len(some)


def _picked(table, tokens):
    """The entry [n] of each token in its row of a table [n, V]."""
    return table.gather(1, tokens[:, None]).squeeze(1)


def _into_slopes(table, tokens):
    """Make of log-probabilities [n, V] what a token's own shrinks by with each logit."""
    table.exp_()
    table[torch.arange(len(tokens), device=tokens.device), tokens] -= 1


class _Gradients:
    """What a sum of scaled log-probabilities passes back to states, weight and bias.

    needed: which of the three have a gradient at all (the weight has none beside LoRA adapters).
    """

    def __init__(self, hidden, weight, bias, needed):
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.of_hidden = torch.empty_like(hidden) if needed[0] else None
        # fp32: in bf16 what later chunks add would be lost.
        self.of_weight, self.of_bias = (
            torch.zeros_like(value, dtype=torch.float32) if need else None
            for value, need in ((weight, needed[1]), (bias, needed[2]))
        )

    def add(self, part, slopes):
        """Add a chunk. slopes: [n, V], how the sum shrinks with each logit."""
        if self.of_bias is not None:
            self.of_bias -= slopes.sum(dim=0, dtype=torch.float32)
        if self.of_hidden is not None:
            self.of_hidden[part] = -(slopes @ self.weight)
        if self.of_weight is not None:
            self.of_weight -= slopes.T @ self.hidden[part]

    def times(self, slope):
        """They, times the slope of the sum itself, in the numbers of what they belong to."""
        pairs = (
            (self.of_hidden, self.hidden),
            (self.of_weight, self.weight),
            (self.of_bias, self.bias),
        )
        return tuple(None if found is None else (found * slope).to(of.dtype) for found, of in pairs)
