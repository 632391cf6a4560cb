"""The KL divergence of a model from another one, estimated on its own responses.

The mean log-ratio of sampled responses estimates the KL divergence with a large variance, because
each token is a single sample. Here, the KL of a token is summed over the k most probable tokens of
the model, and the log-ratio of the sampled token counts only if it is none of them. The estimate
has the same mean; with k the size of the vocabulary, it is the exact KL at each token (Amini et al.
2025, "Better estimation of the KL divergence between language models"). One model is in memory at a
time.

Shapes: n prompts with A responses each, N tokens of all responses: the first responses to all
prompts come first.
"""

from typing import NamedTuple

import numpy as np
import torch

from snakechat.modeling.batching import Examples, MicroBatch
from snakechat.modeling.forward import Policy, evaluation_batches, sequence_sums
from snakechat.workflow.distributed import all_reduce_sum

# Most probable tokens over which the KL is summed.
TOP_K = 64


class Candidates(NamedTuple):
    """Tokens at each token of the responses: the sampled one, then the k most probable ones.

    tokens: int32 [N, 1 + k]. logprobs: fp32 [N, 1 + k], of the model that sampled.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor


@torch.no_grad()
def find_candidates(
    policy: Policy,
    examples: Examples,
    vocab_size: int,
    micro_batch_tokens: int,
    temperature: float,
) -> Candidates:
    """Return the candidates at each token of the responses of a model, over all ranks.

    vocab_size: The size of the vocabulary that all models share.
    """
    k = min(TOP_K, vocab_size)
    num_tokens = int(examples.response_lengths.sum())
    found = Candidates(
        torch.zeros(num_tokens, 1 + k, dtype=torch.int32), torch.zeros(num_tokens, 1 + k)
    )
    for micro_batch in evaluation_batches(policy, examples, micro_batch_tokens):
        batch = micro_batch.batch
        sampled = batch.inputs.input_ids.flatten()[batch.target_index]
        top = policy(batch, top_k=k, vocab_size=vocab_size)
        tokens = torch.cat([sampled[:, None], top.tokens], dim=1)
        values = tokens, policy(batch, temperature, candidates=tokens)
        if micro_batch.counted:
            places = response_tokens(examples, micro_batch)
            for table, new in zip(found, values, strict=True):
                table[places] = new.cpu().to(table.dtype)
    return Candidates(*map(all_reduce_sum, found))


@torch.no_grad()
def divergences(
    other: Policy,
    examples: Examples,
    candidates: Candidates,
    micro_batch_tokens: int,
    temperature: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-ratio and the KL estimate of each response in nats: float64 [A, n] each."""
    logprobs = torch.zeros_like(candidates.logprobs)
    for micro_batch in evaluation_batches(other, examples, micro_batch_tokens):
        places = response_tokens(examples, micro_batch)
        tokens = candidates.tokens[places].long().to(micro_batch.batch.target_index.device)
        values = other(micro_batch.batch, temperature, candidates=tokens)
        if micro_batch.counted:
            logprobs[places] = values.cpu()
    ratios = candidates.logprobs.double() - all_reduce_sum(logprobs).double()
    lengths = torch.from_numpy(examples.response_lengths)
    log_ratios, estimates = (
        sequence_sums(values, lengths.flatten()).view(lengths.shape).numpy()
        for values in (ratios[:, 0], kl_estimates(candidates, ratios))
    )
    return log_ratios, estimates


def kl_estimates(candidates: Candidates, ratios: torch.Tensor) -> torch.Tensor:
    """Return the estimate [N] of the KL at each token.

    Args:
        ratios: Log-ratios [N, 1 + k] of the candidates: log p - log q.
    """
    sampled, top = candidates.tokens[:, :1], candidates.tokens[:, 1:]
    summed = torch.linalg.vecdot(candidates.logprobs[:, 1:].double().exp(), ratios[:, 1:])
    return summed + ratios[:, 0].where((sampled != top).all(dim=1), 0)


def response_tokens(examples: Examples, micro_batch: MicroBatch) -> torch.Tensor:
    """Return the numbers of a micro-batch's target tokens among the tokens of all responses."""
    lengths = examples.response_lengths
    ends = lengths.cumsum().reshape(lengths.shape)
    spans = np.stack([ends - lengths, ends], axis=-1)[:, micro_batch.rows].reshape(-1, 2)
    return torch.from_numpy(np.concatenate([np.arange(*span) for span in spans]))
