"""The passes that training needs of models: what a loss asks for, and no more.

Log-probabilities of some tokens, or scores at some positions: those of others are never made.

Shapes: grids, sequences and tokens as in snakechat/modeling/batches.py; n rows of A responses.
"""

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from snakechat.modeling.logprobs import sum_of_logprobs, token_logprobs
from snakechat.modeling.models import takes_masks
from snakechat.workflow.distributed import rank, total


class Policy(nn.Module):
    """A causal language model whose pass gives log-probabilities of the tokens of a grid."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.packs = takes_masks(model)

    def borrowed_weights(self):
        """Weights that a pass reads without calling their module."""
        head = self.model.get_output_embeddings()
        return [weight for weight in (head.weight, head.bias) if weight is not None]

    def forward(self, grid, temperature=1.0, entropies=False, summed=False):
        """Log-probability [N] of each token of a grid, given those before it.

        With entropies, a pair: these, and the entropy [N] of what each token was drawn from.
        summed: their sum alone, which costs less where it is a loss.
        """
        hidden = hidden_states(self.model, grid)[grid.before]
        tokens = grid.inputs.input_ids.flatten()[grid.tokens]
        head = self.model.get_output_embeddings()
        if summed:
            return sum_of_logprobs(hidden, head.weight, head.bias, tokens)
        return token_logprobs(hidden, head.weight, head.bias, tokens, temperature, entropies)


class Scorer(nn.Module):
    """A model with a score head whose pass gives the head's outputs at places of a grid.

    units: a function of the outputs. A critic that starts as the reward model must speak of rewards
    in the units of those that it is taught.
    """

    def __init__(self, model, units=None):
        super().__init__()
        self.model, self.units = model, units
        self.packs = takes_masks(model)

    def forward(self, grid, places):
        """Outputs at places of a grid: its ends [S], its tokens [N] or those before them [N]."""
        hidden = hidden_states(self.model, grid)[places]
        outputs = self.model.score(hidden).squeeze(-1).float()
        return self.units(outputs) if self.units else outputs


def hidden_states(model, grid):
    """The last hidden state [B * T, D] at each place of a grid."""
    inputs = grid.inputs
    hidden = model.base_model(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        attention_mask=inputs.mask,
        use_cache=False,
    ).last_hidden_state
    return hidden.flatten(end_dim=1)


def padded(values, lengths):
    """A table [S, R] of sequences' values [N], each one's last value repeated behind its end."""
    places = torch.arange(int(lengths.max()), device=values.device)
    starts = lengths.cumsum(dim=0) - lengths
    return values[starts[:, None] + torch.minimum(places, lengths[:, None] - 1)]


@torch.no_grad()
def response_logprobs(policy, examples, max_tokens, temperature=1.0, with_prompts=False):
    """Log-probability of each whole response behind its prompt: numpy [A, n], float64, in nats.

    with_prompts: that of the whole sequence behind its first token.
    """

    def look(grid):
        logprobs = policy(grid, temperature).double()
        return torch.segment_reduce(logprobs, "sum", lengths=grid.lengths)

    return judged(look, policy, examples, max_tokens, with_prompts)


@torch.no_grad()
def response_scores(scorer, examples, max_tokens):
    """Score of each whole sequence, read at its last token: numpy [A, n], float64."""
    return judged(lambda grid: scorer(grid, grid.ends), scorer, examples, max_tokens)


def judged(look, module, examples, max_tokens, with_prompts=False):
    """What a function of a grid says of its sequences [S], for all rows: numpy [A, n]."""
    device = next(module.parameters()).device
    found = torch.zeros(examples.response_lengths.shape, dtype=torch.float64)
    rows = np.arange(len(examples))
    with tqdm(
        total=len(rows), unit="row", mininterval=2, delay=5, leave=False, disable=rank() > 0
    ) as bar:
        for part in examples.passes(rows, max_tokens, module.packs, device, with_prompts):
            values = look(part.grid).view(len(found), -1).double().cpu()
            if part.counts:
                found[:, part.rows] = values
            bar.update(len(part.rows))
    return total(found).numpy()
