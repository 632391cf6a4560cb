"""Rollouts: the responses of a step, and what models say of each of their tokens.

Shapes: n prompts, A responses to each; B = A * n responses, all first ones, then all second ones; R
tokens of the longest. Tables are [B, R], and zero outside of response_mask. Each process asks for
its share of the responses and looks at its share of the passes; all have the whole tables.
"""

import numpy as np
import torch

from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import response_scores
from snakechat.workflow.distributed import rank, all_reduce_sum, world_size


def ask(sampler, prompts, settings):
    """Have the processes of a job response prompts [n] together.

    Returns responses [A][n] (ids), and the sampler's own log-probabilities of their tokens, [A, n, R]
    behind zeros, where it tells them (vllm); else None.
    """
    mine = range(rank(), len(prompts), world_size())
    shape = settings.num_generations, len(prompts), settings.max_response_length
    # 0 where there is no token.
    numbers, logprobs = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    if mine:
        responses, told = sampler.sample([prompts[row] for row in mine])
        for sample, found in enumerate(responses):
            for place, row in enumerate(mine):
                ids = torch.as_tensor(found[place])
                numbers[sample, row, : len(ids)] = ids + 1
                if told:
                    logprobs[sample, row, : len(ids)] = torch.as_tensor(told[sample][place])
    numbers = all_reduce_sum(numbers)
    responses = [[ids[ids > 0].sub(1).tolist() for ids in sample] for sample in numbers]
    return responses, all_reduce_sum(logprobs) if settings.generation_backend == "vllm" else None


class Rollouts:
    """The prompts and responses of a step, and the passes over them.

    responses: [A][n]. ended: [B], whether a response ends by eos.
    """

    def __init__(self, prompts, responses, tokenizer, temperature, max_tokens, device):
        self.examples, self.tokenizer = Examples(prompts, *responses), tokenizer
        self.temperature, self.max_tokens, self.device = temperature, max_tokens, device
        ends = [ids[-1] for sample in responses for ids in sample]
        self.ended = torch.tensor([last == tokenizer.eos_token_id for last in ends], device=device)
        self.lengths = torch.from_numpy(self.examples.response_lengths.flatten()).to(device)
        places = torch.arange(int(self.lengths.max()), device=device)
        self.response_mask = places < self.lengths[:, None]

    def micro_batches(self, rows, packs):
        """The passes over the responses to some prompts, each with its places in tables: the responses
        [b], and response_mask [b, R] of them.
        """
        starts = len(self.examples) * np.arange(len(self.examples.responses))
        for micro_batch in self.examples.micro_batches(rows, self.max_tokens, packs, self.device):
            group = torch.from_numpy((starts[:, None] + micro_batch.rows).flatten()).to(self.device)
            yield micro_batch, group, self.response_mask[group]

    def num_tokens(self, rows):
        """Tokens of the responses to some prompts."""
        return int(self.examples.num_tokens(with_prompts=False)[rows].sum())

    def texts(self):
        """Prompts [B] and responses [B] as text, without special tokens."""
        responses = [ids for sample in self.examples.responses for ids in sample]
        prompts = [*self.examples.prompts] * len(self.examples.responses)
        return tuple(
            self.tokenizer.batch_decode(sequences, skip_special_tokens=True)
            for sequences in (prompts, responses)
        )

    def table(self, values):
        """A table of values [A, n, R at most], on the rollouts' device."""
        return values.flatten(end_dim=1)[:, : self.response_mask.shape[1]].to(self.device)

    def figures(self):
        """How long responses are, and how they end."""
        lengths = self.lengths.float()
        return {
            "response/length": lengths.mean().item(),
            "response/length_p95": lengths.quantile(0.95).item(),
            "response/ended_by_eos": self.ended.float().mean().item(),
        }

    def scores(self, reward):
        """The reward model's score of each response [B]."""
        scores = response_scores(reward, self.examples, self.max_tokens).flatten()
        return torch.from_numpy(scores).float().to(self.device)

    def logprobs(self, policy):
        """Log-probability of each token."""
        [table] = self.tables(policy, lambda batch: [policy(batch, self.temperature)])
        return table

    def logprobs_and_entropies(self, policy):
        """Log-probability of each token, and the entropy of what it was drawn from."""
        return self.tables(policy, lambda batch: policy(batch, self.temperature, return_entropies=True))

    def values(self, critic):
        """The critic's value before each token."""
        [table] = self.tables(critic, lambda batch: [critic(batch, batch.state_index)])
        return table

    @torch.no_grad()
    def tables(self, module, look):
        """What a function of a batch finds at each token of the responses [N], as tables."""
        tables = None
        for micro_batch, group, mask in self.micro_batches(np.arange(len(self.examples)), module.supports_packing):
            found = look(micro_batch.batch)
            if tables is None:
                shape = len(found), *self.response_mask.shape
                tables = torch.zeros(shape, device=self.device)
            if micro_batch.counted:
                for table, values in zip(tables, found, strict=True):
                    table[group] = table[group].masked_scatter(mask, values.float())
        return all_reduce_sum(tables)
