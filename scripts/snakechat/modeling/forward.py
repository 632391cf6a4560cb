"""Forward passes as training needs them: exactly what a loss reads.

Log-probabilities of the target tokens, or scores at given positions. Logits and scores of other
positions are never computed.

The output layer is the widest part of a language model: with a vocabulary of 50,000 the logits of
8,000 tokens take 1.6 GB, several times over in a plain loss. Here they exist for a chunk of the
tokens at a time, and gradients are computed directly from the chunk: with
p = softmax(logits / temperature) of a token's state,
d log p[token] / d logits = (onehot(token) - p) / temperature.

Shapes: B, T, S and N as in snakechat/modeling/batching.py; n rows of A responses each. Of chunks: V
entries of the vocabulary, D dimensions of a state; n tokens of a chunk of logits, m of a chunk in
fp32.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from snakechat.modeling.attention import packed_arguments
from snakechat.modeling.batching import Examples, TokenBatch
from snakechat.modeling.models import (
    acceleration,
    check_sequence_length,
    compile_layers,
    compile_versions,
    supports_packing,
)
from snakechat.workflow.errors import ProgressLines
from snakechat.workflow.processes import all_reduce_sum, rank, world_size

# Of hidden states [N, D], weight [V, D] and bias [V]; None where none is needed. Below, a `layer`
# is these three tensors and the tokens [N].
Gradients = tuple[Tensor | None, ...]


class Wrapper(nn.Module):
    """A model, and whether packed sequences can have several of its rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        # Models that are not trained are compiled too: others would have other rounding errors.
        if acceleration().compile:
            compile_layers(model)
        self.model, self.supports_packing = model, supports_packing(model)


class Policy(Wrapper):
    """A causal language model whose forward pass returns log-probabilities of target tokens."""

    def external_parameters(self) -> list[Tensor]:
        """Return the parameters that `forward` reads without calling the module they belong to.

        ZeRO 3 gathers a parameter when its module is called, and must know of the others.
        """
        head = self.model.get_output_embeddings()
        return [weight for weight in (head.weight, head.bias) if weight is not None]

    def forward(
        self,
        batch: TokenBatch,
        temperature: float = 1.0,
        return_entropies: bool = False,
        return_sum: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the log-probability [N] of each target token given the tokens before it.

        return_entropies: also return the entropy [N] of each token's distribution. return_sum:
        return only the sum of the log-probabilities, which is cheaper for a loss.
        """
        hidden = hidden_states(self.model, batch)[batch.state_index]
        tokens = batch.input_ids.flatten()[batch.target_index]
        head = self.model.get_output_embeddings()
        if return_sum:
            return sum_of_logprobs(hidden, head.weight, head.bias, tokens)
        return token_logprobs(hidden, head.weight, head.bias, tokens, temperature, return_entropies)


class Scorer(Wrapper):
    """A reward model or critic whose forward pass returns its score head's output at positions.

    Attributes:
        normalizer: function of the outputs, or None. A critic initialized from the reward model
            must predict values on the scale of the normalized scores that it is trained on.
    """

    normalizer: Callable[[Tensor], Tensor] | None = None

    def forward(self, batch: TokenBatch, positions: Tensor) -> Tensor:
        """Return fp32 outputs at flat positions: the batch's last_index, target_index or
        state_index.
        """
        hidden = hidden_states(self.model, batch)[positions]
        outputs = cast(Any, self.model.score)(hidden).squeeze(-1).float()
        return self.normalizer(outputs) if self.normalizer else outputs


def hidden_states(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Return the last hidden state [B * T, D] of each position."""
    positions, segments = batch.position_ids, batch.segments
    arguments: dict[str, Any] = {"attention_mask": batch.attention_mask}
    if segments is not None and positions is not None:
        arguments = packed_arguments(model, segments, positions)
    outputs = cast(Any, model.base_model)(
        input_ids=batch.input_ids, position_ids=positions, use_cache=False, **arguments
    )
    return outputs.last_hidden_state.flatten(end_dim=1)


def pad_with_last(values: Tensor, lengths: Tensor) -> Tensor:
    """Turn values [N] of sequences into a table [S, R], padded with each sequence's last value."""
    columns = torch.arange(int(lengths.max()), device=values.device)
    starts = lengths.cumsum(dim=0) - lengths
    return values[starts[:, None] + torch.minimum(columns, lengths[:, None] - 1)]


def sequence_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum [S] of the values [N] of each sequence.

    lengths: [S], with sum N. Torch would wait for the device to check it.
    """
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


@torch.no_grad()
def response_logprobs(policy: Policy, examples: Examples, with_prompts: bool = False) -> np.ndarray:
    """Return the log-probability of each response given its prompt, in nats: float64 [A, n].

    with_prompts: return the log-probability of the whole sequence given its first token.
    """
    return evaluate_sequences(
        lambda batch: sequence_sums(policy(batch).double(), batch.target_lengths),
        policy,
        examples,
        with_prompts,
    )


@torch.no_grad()
def response_scores(scorer: Scorer, examples: Examples) -> np.ndarray:
    """Return the score of each sequence, read at its last token: float64 [A, n]."""
    return evaluate_sequences(lambda batch: scorer(batch, batch.last_index), scorer, examples)


def evaluate_sequences(
    function: Callable[[TokenBatch], Tensor],
    module: Policy | Scorer,
    examples: Examples,
    with_prompts: bool = False,
) -> np.ndarray:
    """Return a function's value of each sequence of all rows, over all ranks: float64 [A, n].

    function: returns a value for each sequence [S] of a batch.
    """
    lengths = examples.prompt_lengths + examples.response_lengths
    check_sequence_length(module.model, int(lengths.max()))
    values = torch.zeros(lengths.shape, dtype=torch.float64)
    device, rows = next(module.parameters()).device, np.arange(len(examples))
    progress, done = ProgressLines("evaluation", "rows", len(rows)), 0
    for micro_batch in examples.micro_batches(rows, module.supports_packing, device, with_prompts):
        batch_values = function(micro_batch.batch).view(len(values), -1).double().cpu()
        if micro_batch.counted:
            values[:, micro_batch.rows] = batch_values
        # The other processes have evaluated about as many rows.
        done = min(done + len(micro_batch.rows) * world_size(), len(rows))
        if rank() == 0:
            progress.update(done)
    return all_reduce_sum(values).numpy()


# --- log-probabilities in chunks -----------------------------------------------------------------


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    temperature: float = 1.0,
    return_entropies: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the log-probability [N] of each token in fp32.

    The backward pass computes the logits a second time.

    hidden: [N, D]. weight: [V, D]. bias: [V] or None. tokens: [N]. return_entropies: also return
    the entropy [N] of each distribution, without gradient.
    """
    logprobs, entropies = _TokenLogprobs.apply(
        hidden, weight, bias, tokens, temperature, return_entropies
    )
    return (logprobs, entropies) if return_entropies else logprobs


def sum_of_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor) -> Tensor:
    """Return the sum of token_logprobs.

    Computes the gradients in the forward pass, and therefore the logits only once.
    """
    if torch.is_grad_enabled():
        return _SumOfLogprobs.apply(hidden, weight, bias, tokens)
    return cast(Any, token_logprobs(hidden, weight, bias, tokens)).sum()


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *layer, ctx.temperature, return_entropies = arguments
        ctx.save_for_backward(*layer)
        tokens = layer[-1]
        logprobs = torch.empty(len(tokens), device=tokens.device)
        entropies = torch.empty_like(logprobs)
        for chunk, logits in logit_chunks(layer):
            logprobs[chunk], entropies[chunk] = _evaluate(
                logits, tokens[chunk], ctx.temperature, return_entropies
            )
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        layer, factors = ctx.saved_tensors, grad_outputs[0][:, None] / ctx.temperature
        _, gradients = _sum_and_gradients(layer, ctx.needs_input_grad, ctx.temperature, factors)
        return *_scaled(gradients, layer[0].dtype), None, None, None


class _SumOfLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *layer: Any) -> Tensor:
        total, ctx.gradients = _sum_and_gradients(layer, ctx.needs_input_grad)
        ctx.dtype = layer[0].dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        gradients = _scaled(ctx.gradients, ctx.dtype, grad_outputs[0])
        # The caller may keep the loss, which would keep the gradients in memory.
        del ctx.gradients
        return *gradients, None


def _sum_and_gradients(
    layer: Sequence[Any],
    needs_grad: tuple[bool, ...],
    temperature: float = 1.0,
    factors: Tensor | None = None,
) -> tuple[Tensor, Gradients]:
    """Return the sum of the log-probabilities, and the gradients of the sum times factors [N, 1].

    needs_grad: Which of hidden states, weight and bias require a gradient. The weight does not if
    only adapters are trained.
    """
    hidden, weight, bias, tokens = layer
    of_hidden = torch.empty_like(hidden) if needs_grad[0] else None
    of_weight, of_bias = (
        # A sum in bf16 would lose what later chunks add.
        torch.zeros_like(each, dtype=torch.float32) if each is not None and needed else None
        for each, needed in ((weight, needs_grad[1]), (bias, needs_grad[2]))
    )
    total = torch.zeros((), device=hidden.device)
    for chunk, logits in logit_chunks(layer):
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


def _scaled(gradients: Gradients, dtype: torch.dtype, factor: Tensor | float = 1.0) -> Gradients:
    return tuple(None if each is None else (each * factor).to(dtype) for each in gradients)


def logit_chunks(layer: Sequence[Any]) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of the tokens of an output layer and their logits [n, V]."""
    hidden, weight, bias, _ = layer
    size = max(1, acceleration().chunk_logits // len(weight))
    for start in range(0, len(hidden), size):
        chunk = slice(start, min(start + size, len(hidden)))
        yield chunk, torch.nn.functional.linear(hidden[chunk], weight, bias)


def _evaluate(
    logits: Tensor, tokens: Tensor, temperature: float, return_entropies: bool
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities [n] of a chunk, and its entropies [n] if they are needed."""
    if acceleration().compile:
        return compiled(logprobs_and_entropies)(logits, tokens, temperature)
    logprobs = torch.empty(len(logits), device=logits.device)
    entropies = torch.empty_like(logprobs)
    for rows, _, table in fp32_logprobs(logits, temperature):
        logprobs[rows] = _select_tokens(table, tokens[rows])
        if return_entropies:
            entropies[rows] = _entropies(table)
    return logprobs, entropies


def _differentiate(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, factors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities [n] of a chunk, and their negative gradients [n, V].

    The gradients, which may take the place of the logits, are multiplied by factors [n, 1].
    """
    if acceleration().compile:
        return compiled(logprobs_and_gradients)(logits, tokens, temperature, factors)
    logprobs = torch.empty(len(logits), device=logits.device)
    for rows, chunk_logits, table in fp32_logprobs(logits, temperature):
        logprobs[rows] = _select_tokens(table, tokens[rows])
        table.exp_()
        table[torch.arange(len(table), device=table.device), tokens[rows]] -= 1
        chunk_logits.copy_(table if factors is None else table.mul_(factors[rows]))
    return logprobs, logits


def fp32_logprobs(logits: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield smaller chunks, views of their logits [m, V], and log-probabilities [m, V] in fp32.

    The log-probabilities may be overwritten and are valid until the next chunk.
    """
    size = max(1, acceleration().fp32_chunk_logits // logits.shape[1])
    buffer = torch.empty(min(size, len(logits)), logits.shape[1], device=logits.device)
    for start in range(0, len(logits), size):
        chunk_logits = logits[start : start + size]
        table = buffer[: len(chunk_logits)].copy_(chunk_logits)
        if temperature != 1:
            table /= temperature
        torch.log_softmax(table, dim=1, out=table)
        yield slice(start, start + len(chunk_logits)), chunk_logits, table


def _select_tokens(table: Tensor, tokens: Tensor) -> Tensor:
    """Return the entry [n] of each token in its row of a table [n, V]."""
    return table.gather(1, tokens[:, None]).squeeze(1)


def _entropies(table: Tensor) -> Tensor:
    """Return the entropies [n] of log-probabilities [n, V]."""
    return -torch.linalg.vecdot(table.exp(), table)


@functools.cache
def compiled(function: Callable[..., Any]) -> Any:
    """Return one of the functions below as one kernel, which reads the logits [n, V] once."""
    return compile_versions(function, dynamic=True)


def logprobs_and_entropies(
    logits: Tensor, tokens: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return what _evaluate returns."""
    table = (logits.float() / temperature).log_softmax(dim=1)
    return _select_tokens(table, tokens), _entropies(table)


def logprobs_and_gradients(
    logits: Tensor, tokens: Tensor, temperature: float, factors: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what _differentiate returns."""
    table = (logits.float() / temperature).log_softmax(dim=1)
    is_token = torch.arange(logits.shape[1], device=logits.device) == tokens[:, None]
    gradients = table.exp() - is_token.float()
    if factors is not None:
        gradients = gradients * factors
    return _select_tokens(table, tokens), gradients.to(logits.dtype)
