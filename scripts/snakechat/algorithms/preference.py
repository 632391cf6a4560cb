"""Losses and metrics of preference pairs, and of responses that are labelled good or bad (KTO).

Shapes: B pairs or rows, R tokens of the longest response. A row of labelled responses has a good
response, a bad one or both.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snakechat.config.settings import (
    DpoSettings,
    PreferenceSettings,
    has_reference,
    has_reference_point,
)
from snakechat.modeling.batching import Examples, MicroBatch
from snakechat.modeling.forward import Policy, response_logprobs
from snakechat.modeling.models import copy_to_device
from snakechat.training.engine import Engine
from snakechat.workflow.processes import all_reduce_sum

# Rounding error of the log-probability of a token, in nats: the largest difference of 80 responses
# between two ways to pack them (12 layers, random weights), divided by the root of their length.
TOKEN_ROUNDING = {"fp32": 1e-5, "bf16": 0.06, "fp16": 0.01}
# Relative rounding error of the score of a reward model in fp32.
SCORE_ROUNDING = 1e-6
# Ends of names of files: log-probabilities of rows, and of their prompts with other responses.
ROWS, MISMATCHED = ".npy", ".mismatched.npy"


def pairwise_loss(chosen_scores: Tensor, rejected_scores: Tensor) -> Tensor:
    """Return -log sigmoid(chosen - rejected) (Ouyang et al. 2022, eq. 1). Any shape."""
    return -torch.nn.functional.logsigmoid(chosen_scores - rejected_scores)


def dpo_loss(
    chosen_rewards: Tensor, rejected_rewards: Tensor, label_smoothing: float, robust: bool = False
) -> Tensor:
    """Return the loss of each pair [B] from implicit rewards [B] (Rafailov et al. 2023, eq. 7).

    Args:
        label_smoothing: The probability that a pair is labeled the wrong way round; 0 is plain DPO
            (Mitchell 2023, "A note on DPO with noisy preferences", eq. 3).
        robust: The mean over pairs with such labels is the mean of plain DPO's loss over correct
            ones (Chowdhury et al. 2024, eq. 12).
    """
    as_labeled = (1 - label_smoothing) * pairwise_loss(chosen_rewards, rejected_rewards)
    flipped = label_smoothing * pairwise_loss(rejected_rewards, chosen_rewards)
    return (as_labeled - flipped) / (1 - 2 * label_smoothing) if robust else as_labeled + flipped


def log_odds(mean_logprobs: Tensor) -> Tensor:
    """Return log(p / (1 - p)), any shape, of p = exp(mean logprob) (Hong et al. 2024, eq. 4)."""
    # A probability of 1 would be infinitely likelier than any other.
    mean_logprobs = mean_logprobs.clamp(max=-1e-6)
    return mean_logprobs - torch.log(-torch.expm1(mean_logprobs))


def kto_loss(
    rewards: Tensor, lengths: Tensor, reference_point: Tensor, settings: PreferenceSettings
) -> Tensor:
    """Return the loss of each row [B], the mean over its responses (Ethayarajh et al. 2024, eq. 8).

    rewards [2, B] are the implicit ones of good and bad responses, which are compared with the
    reference point, a scalar. lengths [2, B] are 0 for a response that a row does not have.
    """
    good, bad = rewards
    of_good = settings.desirable_weight * torch.sigmoid(reference_point - good)
    of_bad = settings.undesirable_weight * torch.sigmoid(bad - reference_point)
    present = lengths > 0
    return (torch.stack([of_good, of_bad]) * present).sum(dim=0) / present.sum(dim=0)


def response_rewards(
    settings: PreferenceSettings, logprobs: Tensor, ref_logprobs: Tensor | None, lengths: Tensor
) -> Tensor:
    """Return the implicit rewards of responses with lengths of any shape.

    With a reference model, beta * log(policy / reference) (Rafailov et al. 2023, section 4);
    ref_logprobs is None for losses without one.
    """
    lengths = lengths.clamp(min=1)
    if not has_reference(settings.loss):
        means = logprobs / lengths
        return log_odds(means) if settings.loss == "orpo" else settings.beta * means
    assert ref_logprobs is not None
    if settings.length_normalized:
        return settings.beta * (logprobs / lengths - ref_logprobs / lengths)
    return settings.beta * (logprobs - ref_logprobs)


def reward_rounding(settings: PreferenceSettings, lengths: Tensor, dtype: str) -> Tensor:
    """Return how far rounding in dtype moves implicit rewards, of the shape of lengths.

    The errors of a response's tokens are independent of each other. Of a policy that equals its
    reference model, all rewards are errors.
    """
    lengths = lengths.clamp(min=1)
    errors = TOKEN_ROUNDING[dtype] * lengths.double().sqrt()
    if settings.length_normalized or not has_reference(settings.loss):
        errors = errors / lengths
    return settings.beta * errors


def preference_losses(
    settings: PreferenceSettings,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    lengths: Tensor,
    reference_point: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the losses [B] of rows and the implicit rewards [2, B] of responses.

    Log-probabilities and lengths are of chosen and rejected responses [2, B]; ref_logprobs is None
    for losses without a reference model. reference_point: The step's, for KTO.
    """
    rewards = response_rewards(settings, logprobs, ref_logprobs, lengths)
    chosen, rejected = rewards
    match settings.loss:
        case "kto":
            assert reference_point is not None
            losses = kto_loss(rewards, lengths, reference_point, settings)
        case "orpo":
            # Hong et al. 2024, eq. 6 and 7, where beta is lambda.
            losses = settings.beta * pairwise_loss(chosen, rejected)
        case "simpo":
            # Meng et al. 2024, eq. 6.
            losses = pairwise_loss(chosen - settings.margin, rejected)
        case "ipo":
            # Azar et al. 2023, eq. 17, of the difference of log ratios, rewards / beta.
            losses = ((chosen - rejected) / settings.beta - 1 / (2 * settings.beta)) ** 2
        case "dpo" | "robust":
            losses = dpo_loss(chosen, rejected, settings.label_smoothing, settings.loss == "robust")
    # Pang et al. 2024, eq. 1; with a coefficient of 1, the loss of ORPO.
    return losses - settings.sft_coef * (logprobs / lengths.clamp(min=1))[0], rewards


def per_token_loss(chosen_scores: Tensor, rejected_scores: Tensor, mask: Tensor) -> Tensor:
    """Return the loss of each pair [B]: the mean of pairwise_loss over the mask [B, R].

    Scores [B, R] are padded with a response's last score. (This is the loss of DeepSpeed-Chat,
    which reads the scores of padding tokens there.)
    """
    losses = pairwise_loss(chosen_scores, rejected_scores) * mask
    return losses.sum(dim=1) / mask.sum(dim=1)


def divergent_positions(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Return the mask [B, R] from the first difference of a pair to the end of the longer response.

    tokens [2B, R]: Chosen responses first, padded with a response's last token; lengths [2B].
    """
    chosen, rejected = tokens.chunk(2)
    first, second = lengths.chunk(2)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    shorter_ended = columns >= torch.minimum(first, second)[:, None]
    diverged = ((chosen != rejected) | shorter_ended).cumsum(dim=1) > 0
    return diverged & (columns < torch.maximum(first, second)[:, None])


# --- steps and metrics ----------------------------------------------------------------------------


def pair_gradients(
    engine: Engine[Any],
    examples: Examples,
    rows: np.ndarray,
    device: torch.device,
    losses_and_scores: Callable[[MicroBatch], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Accumulate the gradients of a step on rows [B]; return their losses [B], scores [2, B].

    The loss of the step is the mean of the rows' losses. All ranks get the losses and the scores of
    all rows, on the CPU in float64.

    losses_and_scores: Returns the losses and scores of the rows of a micro-batch.
    """
    places = {int(row): place for place, row in enumerate(rows)}
    table = torch.zeros(3, len(rows), device=device)
    for micro_batch in examples.micro_batches(rows, engine.module.supports_packing, device):
        losses, scores = losses_and_scores(micro_batch)
        engine.backward(micro_batch.counted / len(rows) * losses.sum(), micro_batch.is_last)
        if micro_batch.counted:
            columns = torch.tensor([places[row] for row in micro_batch.rows])
            values = torch.cat([losses.detach()[None], scores.detach()]).float()
            table.index_copy_(1, copy_to_device(columns, device), values)
    table = all_reduce_sum(table).double().cpu()
    return table[0], table[1:]


def pair_metrics(
    losses: Tensor, scores: Tensor, rounding: Tensor | float = 0.0
) -> dict[str, float]:
    """Return the metrics of pairs: losses [B], scores [2, B] of chosen and rejected responses.

    A tie counts as incorrect: a margin up to its rounding error, which is [B] or a number.
    """
    chosen, rejected = scores
    margins = chosen - rejected
    ties = margins.abs() <= rounding
    means = {
        "loss": losses,
        "accuracy": (margins > 0) & ~ties,
        "ties": ties,
        "margin": margins,
        "chosen_score": chosen,
        "rejected_score": rejected,
    }
    return {name: values.double().mean().item() for name, values in means.items()}


def labelled_metrics(
    losses: Tensor, scores: Tensor, present: Tensor, rounding: float = 0.0
) -> dict[str, float]:
    """Return the metrics of good and bad responses with losses [B] and scores [2, B].

    What needs good and bad responses is omitted if there are only good ones or only bad ones.

    present: bool [2, B], which of them there are. Scores that differ by rounding or less are ties.
    """
    metrics = {
        "loss": losses.mean().item(),
        "responses": int(present.sum()),
        "share_good": present[0].sum().item() / present.sum().item(),
    }
    good, bad = (values[mask] for values, mask in zip(scores, present, strict=True))
    if len(good) and len(bad):
        metrics["auc"] = placements(good, bad, rounding).mean().item()
    for name, values in (("good_score", good), ("bad_score", bad)):
        if len(values):
            metrics[name] = values.mean().item()
    return metrics


def placements(scores: Tensor, others: Tensor, rounding: float) -> Tensor:
    """Return the share of the others [m] below each score [n]; a tie counts one half: float64 [n].

    Its mean over good responses, of bad ones as the others, is the area under the ROC curve.
    """
    others = others.sort().values
    below = torch.searchsorted(others, scores - rounding)
    not_above = torch.searchsorted(others, scores + rounding, right=True)
    return (below + not_above).double() / 2 / len(others)


# --- rows of DPO ----------------------------------------------------------------------------------


class PreferenceData:
    """A split with the log-probabilities of its responses under the reference model.

    Args:
        inputs: Folders of `tokens` and, unless compute_reference follows, of the `reference`.

    Attributes:
        rows: A prompt, its chosen and its rejected response each. For KTO, one may be empty.
        epoch: The epoch in training, to which the log-probabilities belong. They differ
            between epochs by rounding alone (compute_reference.py).
        reference: Log-probabilities [E, A, n] under the reference model: of the ROWS, and for KTO
            of MISMATCHED responses. Empty for losses without a reference model.
    """

    def __init__(self, settings: DpoSettings, inputs: Mapping[str, Path], split: str) -> None:
        self.settings = settings
        self.rows = Examples.read(inputs["tokens"], split, "chosen", "rejected")
        self.lengths = torch.from_numpy(self.rows.response_lengths)
        self.epoch = 0
        self.examples = {ROWS: self.rows}
        self.reference: dict[str, Tensor] = {}
        if has_reference_point(settings.loss):
            self.examples[MISMATCHED] = self.rows.mismatched(settings.max_length, split)
        if folder := inputs.get("reference"):
            tables = {name: np.load(folder / f"{split}{name}") for name in self.examples}
            self.reference = {name: torch.from_numpy(table) for name, table in tables.items()}

    def compute_reference(self, policy: Policy) -> None:
        """Compute the log-probabilities under the reference model."""
        for name, examples in self.examples.items():
            self.reference[name] = torch.from_numpy(response_logprobs(policy, examples))[None]

    def reference_point(self, policy: Policy, rows: np.ndarray) -> Tensor | None:
        """Return the reward with which KTO compares the rewards of rows; None for other losses.

        It is beta times the KL estimate of responses to other prompts, which is not negative
        (Ethayarajh et al. 2024, section 4.1).
        """
        if not has_reference_point(self.settings.loss):
            return None
        examples = self.examples[MISMATCHED].select(rows)
        logprobs = torch.from_numpy(response_logprobs(policy, examples))
        reference = self._of_epoch(MISMATCHED, rows, logprobs.device)
        lengths = torch.from_numpy(examples.response_lengths)
        return response_rewards(self.settings, logprobs, reference, lengths).mean().clamp(min=0)

    def losses(
        self, logprobs: Tensor, rows: np.ndarray | list[int], reference_point: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the losses [B] of the given rows and the implicit rewards [2, B] of responses.

        logprobs: Of chosen and rejected responses [2, B]. reference_point: Of the step, for KTO.
        """
        reference = self._of_epoch(ROWS, rows, logprobs.device)
        lengths = copy_to_device(self.lengths[:, rows], logprobs.device)
        return preference_losses(self.settings, logprobs, reference, lengths, reference_point)

    def metrics(
        self, losses: Tensor, rewards: Tensor, rows: np.ndarray | slice = slice(None)
    ) -> dict[str, float]:
        """Return the metrics of rows from their losses [B] and implicit rewards [2, B]."""
        lengths = self.lengths[:, rows]
        rounding = reward_rounding(self.settings, lengths, self.settings.dtype)
        if not has_reference_point(self.settings.loss):
            return pair_metrics(losses, rewards, rounding.sum(dim=0))
        present = lengths > 0
        limit = 2 * rounding[present].mean().item()
        return labelled_metrics(losses, rewards, present, limit)

    def evaluate(self, policy: Policy) -> tuple[Tensor, Tensor]:
        """Return the losses [n] and the implicit rewards [2, n] of all rows, in float64."""
        rows = np.arange(len(self.rows))
        logprobs = torch.from_numpy(response_logprobs(policy, self.rows))
        return self.losses(logprobs, rows, self.reference_point(policy, rows))

    def _of_epoch(
        self, name: str, rows: np.ndarray | list[int], device: torch.device
    ) -> Tensor | None:
        """Return the log-probabilities [A, B] of rows under the reference model, if any."""
        if not has_reference(self.settings.loss):
            return None
        table = self.reference[name]
        return copy_to_device(table[min(self.epoch, len(table) - 1)][:, rows], device)
