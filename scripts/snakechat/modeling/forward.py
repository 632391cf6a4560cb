"""Forward passes as training needs them: exactly what a loss reads.

Log-probabilities of the target tokens, or scores at given positions; other positions are never
computed.

Shapes: B, T, S and N as in snakechat/modeling/batching.py; n rows of A responses each.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from snakechat.modeling import acceleration
from snakechat.modeling.acceleration import compile_layers
from snakechat.modeling.attention import packed_arguments
from snakechat.modeling.batching import Examples, TokenBatch
from snakechat.modeling.logprobs import sum_of_logprobs, token_logprobs
from snakechat.modeling.models import check_sequence_length, supports_packing
from snakechat.workflow.errors import FIRST_LINE, ProgressLines
from snakechat.workflow.processes import all_reduce_sum, rank, world_size


class Wrapper(nn.Module):
    """A model, and whether packed sequences can have several of its rows."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        # Models that are not trained are compiled too: others would have other rounding errors.
        if acceleration.current().compile:
            compile_layers(model)
        self.model, self.supports_packing = model, supports_packing(model)


class Policy(Wrapper):
    """A causal language model whose forward pass returns log-probabilities of target tokens."""

    def external_parameters(self) -> list[torch.Tensor]:
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
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probability [N] of each target token given the tokens before it.

        Args:
            return_entropies: also return the entropy [N] of each token's distribution.
            return_sum: return only the sum of the log-probabilities, which is cheaper for a loss.
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

    normalizer: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, batch: TokenBatch, positions: torch.Tensor) -> torch.Tensor:
        """Return fp32 outputs at flat positions: the batch's last_index, target_index or
        state_index.
        """
        hidden = hidden_states(self.model, batch)[positions]
        score_head: Any = self.model.score
        outputs = score_head(hidden).squeeze(-1).float()
        return self.normalizer(outputs) if self.normalizer else outputs


def hidden_states(model: PreTrainedModel, batch: TokenBatch) -> torch.Tensor:
    """Return the last hidden state [B * T, D] of each position."""
    positions, segments = batch.position_ids, batch.segments
    arguments: dict[str, Any] = {"attention_mask": batch.attention_mask}
    if segments is not None and positions is not None:
        arguments = packed_arguments(model, segments, positions)
    base_model: Any = model.base_model
    hidden = base_model(
        input_ids=batch.input_ids, position_ids=positions, use_cache=False, **arguments
    ).last_hidden_state
    return hidden.flatten(end_dim=1)


def pad_with_last(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Turn values [N] of sequences into a table [S, R], padded with each sequence's last value."""
    columns = torch.arange(int(lengths.max()), device=values.device)
    starts = lengths.cumsum(dim=0) - lengths
    return values[starts[:, None] + torch.minimum(columns, lengths[:, None] - 1)]


def sequence_sums(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the sum [S] of the values [N] of each sequence.

    lengths: [S], with sum N. Torch would wait for the device to check it.
    """
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


@torch.no_grad()
def response_logprobs(policy: Policy, examples: Examples, with_prompts: bool = False) -> np.ndarray:
    """Return the log-probability of each response given its prompt, in nats: float64 [A, n].

    Args:
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
    function: Callable[[TokenBatch], torch.Tensor],
    module: Policy | Scorer,
    examples: Examples,
    with_prompts: bool = False,
) -> np.ndarray:
    """Return a function's value of each sequence of all rows, over all ranks: float64 [A, n].

    function: returns a value for each sequence [S] of a batch.
    """
    lengths = examples.prompt_lengths + examples.response_lengths
    check_sequence_length(module.model, int(lengths.max(initial=0)))
    values = torch.zeros(lengths.shape, dtype=torch.float64)
    device, rows = next(module.parameters()).device, np.arange(len(examples))
    progress, done = ProgressLines("evaluation", "rows", len(rows), next_line=FIRST_LINE), 0
    for micro_batch in examples.micro_batches(rows, module.supports_packing, device, with_prompts):
        batch_values = function(micro_batch.batch).view(len(values), -1).double().cpu()
        if micro_batch.counted:
            values[:, micro_batch.rows] = batch_values
        # The other processes have evaluated about as many rows.
        done = min(done + len(micro_batch.rows) * world_size(), len(rows))
        if rank() == 0:
            progress.update(done)
    return all_reduce_sum(values).numpy()
