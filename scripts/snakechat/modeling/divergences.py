"""The most probable tokens of a teacher, and how far a student is from them.

For each target token, a teacher has the log-probabilities of its k most probable tokens; all other
tokens are one event, the rest. With p of the teacher and q of the student, the divergence is
KL(p || q) over these k + 1 events in nats. The KL over the whole vocabulary is larger, or equal
where the student divides the rest as the teacher does. The gradient for the logit of token v is
q[v] - p[v] for the k tokens, and q[v] * (1 - p[rest] / q[rest]) for the others.

Shapes as in logprobs.py: N target tokens, V entries of the vocabulary, D dimensions of a state, m
tokens of a chunk.
"""

from typing import Any, NamedTuple

import torch

from snakechat.modeling.logprobs import Gradients, SumWithGradients, fp32_logprobs, logit_chunks

# The probability of the rest under a student where it underflows.
SMALLEST = torch.finfo(torch.float32).tiny


class TopLogprobs(NamedTuple):
    """The most probable tokens of a teacher at N target tokens.

    tokens: int64 [N, k]. logprobs: fp32 [N, k].
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor


@torch.no_grad()
def top_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    k: int,
    vocab_size: int | None = None,
) -> TopLogprobs:
    """Return the k most probable tokens after each state, from the most probable on.

    Args:
        hidden: [N, D]. weight: [V, D]. bias: [V] or None.
        vocab_size: only tokens below this number. V may be larger, and differs between models with
            the same tokenizer.
    """
    logprobs = torch.empty(len(hidden), k, device=hidden.device)
    tokens = torch.empty_like(logprobs, dtype=torch.int64)
    for chunk, logits in logit_chunks(hidden, weight, bias):
        for rows, _, table in fp32_logprobs(chunk, logits):
            torch.topk(table[:, :vocab_size], k, dim=1, out=(logprobs[rows], tokens[rows]))
    return TopLogprobs(tokens, logprobs)


def sum_of_divergences(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, teacher: TopLogprobs
) -> torch.Tensor:
    """Return the sum of the divergences of N target tokens, in nats.

    As in sum_of_logprobs, the forward pass computes the gradients.
    """
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    total: torch.Tensor = _SumOfDivergences.apply(hidden, weight, bias, *teacher)
    return total


class _SumOfDivergences(SumWithGradients):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tokens: torch.Tensor,
        logprobs: torch.Tensor,
    ) -> torch.Tensor:
        ctx.gradients = Gradients(hidden, weight, bias, ctx.needs_input_grad)
        total = torch.zeros((), device=hidden.device)
        for chunk, logits in logit_chunks(hidden, weight, bias):
            for rows, chunk_logits, table in fp32_logprobs(chunk, logits):
                total += replace_by_gradients_(table, tokens[rows], logprobs[rows]).sum()
                chunk_logits.copy_(table.neg_())
            ctx.gradients.add(chunk, logits)
        return total


def replace_by_gradients_(
    table: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor
) -> torch.Tensor:
    """Return the divergences [m], and replace a student's log-probabilities by their gradients.

    Args:
        table: The log-probabilities [m, V] of the student.
        tokens, logprobs: The teacher's [m, k].
    """
    student = table.gather(1, tokens)
    teacher = logprobs.exp()
    table.exp_().scatter_(1, tokens, 0.0)
    # Sums of small numbers: 1 minus the sum of the k probabilities would lose them.
    rest = table.sum(dim=1).clamp_min(SMALLEST)
    teacher_rest = (1 - teacher.sum(dim=1)).clamp_min(0)
    ratio = teacher_rest / rest
    table *= (1 - ratio)[:, None]
    table.scatter_(1, tokens, student.exp() - teacher)
    divergences = torch.linalg.vecdot(teacher, logprobs - student)
    return divergences + torch.xlogy(teacher_rest, ratio)
