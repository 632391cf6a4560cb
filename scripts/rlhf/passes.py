"""The passes that training needs of models: what a loss asks for, and no more.

Log-probabilities of some tokens, or scores at some positions: those of others are never made.

Shapes: B sequences, T tokens, N selected tokens of all sequences, row after row.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from rlhf.batches import micro_batches, pad, span_mask
from rlhf.job import InputError


class Policy(nn.Module):
    """A causal language model whose pass gives log-probabilities of chosen tokens."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    @property
    def causal(self):
        """The transformers model, inside its adapters if it has some."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    def forward(self, input_ids, attention_mask, targets, temperature=1.0, entropies=False):
        """Log-probabilities [N] of the tokens at targets, each given those before it.

        input_ids, attention_mask: [B, T]; targets: [B, T] bool, false at position 0. With
        entropies, a pair: these, and the entropy [N] of what each token was drawn from.
        """
        hidden = self.causal.base_model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        logits = self.causal.get_output_embeddings()(hidden[:, :-1][targets[:, 1:]])
        logits = logits.float() / temperature
        logprobs = -functional.cross_entropy(logits, input_ids[targets], reduction="none")
        if not entropies:
            return logprobs
        return logprobs, torch.distributions.Categorical(logits=logits.detach()).entropy()


class Standardizer:
    """The units that scores are told in: deviations from a mean."""

    def __init__(self):
        self.mean, self.deviation = 0.0, 1.0

    def __call__(self, scores):
        return (scores - self.mean) / self.deviation

    def fit(self, scores):
        """Take mean and deviation of these scores. Raises InputError where all are the same."""
        # Not by the deviation, which rounding leaves above 0.
        if scores.min() == scores.max():
            raise InputError("the reward model gives every answer the same score")
        self.mean, self.deviation = scores.mean().item(), scores.std(correction=0).item()

    def state(self):
        """For a run that is resumed."""
        return {"mean": self.mean, "deviation": self.deviation}

    def restore(self, state):
        """Put a state back."""
        self.mean, self.deviation = state["mean"], state["deviation"]


class Scorer(nn.Module):
    """A model with a score head whose pass gives the head's outputs at chosen positions.

    The outputs are standardised: a critic that starts as the reward model must speak of rewards in
    the same units as those that it is taught.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.standardizer = Standardizer()

    def forward(self, input_ids, attention_mask, positions):
        """Outputs [N] at positions. input_ids, attention_mask: [B, T]; positions: [B, T] bool."""
        hidden = self.model.base_model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        scores = self.model.score(hidden[positions]).squeeze(-1).float()
        return self.standardizer(scores)


def row_sums(values, mask):
    """Sum [B] of each row's values [N], which stand row after row where mask [B, T] is true."""
    table = torch.zeros(mask.shape, device=values.device).masked_scatter(mask, values)
    return table.sum(dim=1)


@torch.no_grad()
def response_logprobs(policy, prompts, responses, pad_id, max_tokens, temperature=1.0):
    """Log-probability of each whole response behind its prompt: numpy [n], float64, in nats."""
    device = next(policy.parameters()).device
    sums = np.zeros(len(prompts))
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    for rows in micro_batches(range(len(prompts)), lengths, max_tokens):
        sequences = [[*prompts[row], *responses[row]] for row in rows]
        input_ids, attention_mask = pad(sequences, pad_id, device)
        starts, ends = [len(prompts[row]) for row in rows], [lengths[row] for row in rows]
        tokens = span_mask(starts, ends, input_ids.shape[1], device)
        logprobs = policy(input_ids, attention_mask, tokens, temperature)
        sums[rows] = row_sums(logprobs, tokens).double().cpu().numpy()
    return sums


@torch.no_grad()
def score_last_tokens(scorer, sequences, pad_id, max_tokens):
    """Score [B] of each sequence of ids, read at its last token."""
    device = next(scorer.parameters()).device
    lengths = [len(sequence) for sequence in sequences]
    scores = torch.zeros(len(sequences), device=device)
    for rows in micro_batches(range(len(sequences)), lengths, max_tokens):
        input_ids, attention_mask = pad([sequences[row] for row in rows], pad_id, device)
        ends = [lengths[row] for row in rows]
        last = span_mask([end - 1 for end in ends], ends, input_ids.shape[1], device)
        scores[rows] = scorer(input_ids, attention_mask, last)
    return scores
