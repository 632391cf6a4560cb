"""Rollouts: the prompts and responses of a step, and values of models at each response token.

Shapes: n prompts, A responses to each; B = A * n responses, all first responses, then all second
ones; R tokens of the longest response. Tables are [B, R] and zero outside response_mask. Each rank
samples its share of the responses and evaluates its share of the micro-batches; every rank gets the
complete tables.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from snakechat.modeling.batching import Examples, MicroBatch, TokenBatch
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.generation import Sampler
from snakechat.modeling.models import copy_to_device
from snakechat.workflow.processes import all_reduce_sum, rank, world_size

# Token ids of each response, by its number and prompt: [A][n].
TokenLists = list[list[Any]]


def sample_on_all_ranks(
    sampler: Sampler,
    prompts: Sequence[Any],
    sampling: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> tuple[TokenLists, torch.Tensor | None]:
    """Distribute prompts [n] over the samplers, sample, and gather the responses on every rank.

    They are the responses that the first rank would sample alone, up to rounding.

    sampling: Returns a context in which the ranks may call the model different numbers of times.

    Returns:
        Token ids of the responses [A][n]; and the sampler's own log-probabilities of their tokens
        [A, n, max_response_length], padded with zeros, or None if the sampler computes the same
        ones as the trainer (generation_backend: hf).
    """
    first, step = rank() // sampler.num_ranks, world_size() // sampler.num_ranks
    own_rows = range(first, len(prompts), step)
    shape = sampler.num_generations, len(prompts), sampler.max_response_length
    # Token id + 1, so that 0 marks the end.
    ids, logprobs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    share_random_numbers()
    with contextlib.nullcontext() if sampler.has_copy else sampling():
        if own_rows:
            responses, own_logprobs = sampler.sample(prompts, own_rows)
            # The other ranks of the sampler have the same responses.
            if rank() % sampler.num_ranks == 0:
                for number, place in product(range(len(responses)), range(len(own_rows))):
                    row, sampled = own_rows[place], responses[number][place]
                    ids[number, row, : len(sampled)] = torch.tensor(sampled) + 1
                    if own_logprobs:
                        values = torch.tensor(own_logprobs[number][place])
                        logprobs[number, row, : len(sampled)] = values
    shifted_ids = all_reduce_sum(ids)
    gathered = [[row[row > 0].sub(1).tolist() for row in rows] for rows in shifted_ids]
    return gathered, all_reduce_sum(logprobs) if sampler.has_copy else None


def share_random_numbers() -> None:
    """Give all ranks the generator of the first one, which may have called functions."""
    state = torch.get_rng_state()
    torch.set_rng_state(all_reduce_sum(state if rank() == 0 else torch.zeros_like(state)))


class Rollouts:
    """The prompts and responses of a step.

    Args:
        responses: Token ids [A][n], which may end in one of the stop_ids.
        sampler_logprobs: The sampler's log-probabilities [A, n, R or more], or None.

    Attributes:
        response_ids: Token ids of each response [B], which have lengths [B].
        ended: bool [B], whether a response ends with a stop id.
        response_mask: bool [B, R].
        sampler_logprobs: Table of the sampler's log-probabilities, or None.
    """

    def __init__(
        self,
        prompts: Sequence[Any],
        responses: TokenLists,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        temperature: float,
        device: torch.device,
        sampler_logprobs: torch.Tensor | None = None,
    ) -> None:
        self.examples, self.tokenizer = Examples(prompts, *responses), tokenizer
        self.response_ids: list[list[int]] = [ids for sequences in responses for ids in sequences]
        self.num_prompts, self.num_responses = len(prompts), len(self.response_ids)
        self.temperature, self.device = temperature, device
        self.ended = self.on_device(np.array([ids[-1] in stop_ids for ids in self.response_ids]))
        self.lengths = self.on_device(self.examples.response_lengths.flatten())
        columns = torch.arange(int(self.examples.response_lengths.max()), device=device)
        self.response_mask = columns < self.lengths[:, None]
        self.sampler_logprobs = None
        if sampler_logprobs is not None:
            self.sampler_logprobs = copy_to_device(
                sampler_logprobs.flatten(end_dim=1)[:, : len(columns)], device
            )

    def micro_batches(
        self, rows: np.ndarray, packing: bool
    ) -> Iterator[tuple[MicroBatch, torch.Tensor, torch.Tensor]]:
        """Yield this rank's micro-batches of the responses to the given prompts.

        With the rows [b] of their responses in tables, and flat indices [N] of their tokens.
        """
        width, all_lengths = self.response_mask.shape[1], self.examples.response_lengths.flatten()
        for micro_batch in self.examples.micro_batches(rows, packing, self.device):
            # On the host: a mask would wait for the device to count its tokens.
            responses = self.responses_to(micro_batch.rows)
            ranges = zip(responses * width, all_lengths[responses], strict=True)
            tokens = np.concatenate([start + np.arange(length) for start, length in ranges])
            yield micro_batch, self.on_device(responses), self.on_device(tokens)

    def responses_to(self, rows: np.ndarray | Sequence[int]) -> np.ndarray:
        """Return the rows of the tables [b] of the responses to the given prompts."""
        return np.arange(self.num_responses).reshape(-1, self.num_prompts)[:, rows].flatten()

    def on_device(self, array: np.ndarray) -> torch.Tensor:
        """Return an array as a tensor on the device of the tables."""
        return copy_to_device(torch.from_numpy(array), self.device)

    def num_tokens(self, rows: np.ndarray) -> int:
        """Return the number of tokens of the responses to the given prompts."""
        return int(self.examples.num_tokens(with_prompts=False)[rows].sum())

    def decode(self) -> tuple[list[str], list[str]]:
        """Return prompts [B] and responses [B] as text, without special tokens."""
        rows: Any = self.examples.prompts
        prompts = [*rows] * len(self.examples.responses)
        return (
            self.tokenizer.batch_decode(prompts, skip_special_tokens=True),
            self.tokenizer.batch_decode(self.response_ids, skip_special_tokens=True),
        )

    def response_texts(self) -> list[str]:
        """Return responses [B] as text, without the tokens that end them.

        Other special tokens stay visible: they are not part of a good response.
        """
        pairs = zip(self.response_ids, self.ended.tolist(), strict=True)
        ids = [ids[:-1] if is_ended else ids for ids, is_ended in pairs]
        return list(
            self.tokenizer.batch_decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def logprobs(self, policy: Policy) -> torch.Tensor:
        """Return the table of log-probabilities."""
        return self.evaluate(policy, 1, lambda batch: [policy(batch, self.temperature)])[0]

    def logprobs_and_entropies(self, policy: Policy) -> torch.Tensor:
        """Return the tables of log-probabilities and of entropies of the tokens' distributions."""
        return self.evaluate(
            policy, 2, lambda batch: policy(batch, self.temperature, return_entropies=True)
        )

    def values(self, critic: Scorer) -> torch.Tensor:
        """Return the table of the critic's values of the state before each token."""
        return self.evaluate(critic, 1, lambda batch: [critic(batch, batch.state_index)])[0]

    @torch.no_grad()
    def evaluate(
        self, module: Policy | Scorer, number: int, function: Callable[[TokenBatch], Any]
    ) -> torch.Tensor:
        """Return tables [k, B, R] of the k values [N] that a function returns for each batch.

        number: k.
        """
        tables = torch.zeros(number, *self.response_mask.shape, device=self.device)
        rows = np.arange(self.num_prompts)
        for micro_batch, _, tokens in self.micro_batches(rows, module.supports_packing):
            values = torch.stack([*function(micro_batch.batch)]).float()
            if micro_batch.counted:
                tables.view(number, -1).index_copy_(1, tokens, values)
        return all_reduce_sum(tables)
