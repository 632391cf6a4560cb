"""Losses and metrics of preference pairs, and of responses that are labelled good or bad (KTO).

Pure functions of tensors. Shapes: B pairs or rows, R tokens of the longest response. A row of
labelled responses has a good response, a bad one or both.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from snakechat.config.settings import PreferenceSettings, has_reference
from snakechat.modeling.acceleration import copy_to_device
from snakechat.modeling.batching import MicroBatch
from snakechat.workflow.processes import all_reduce_sum

# Rounding error of the log-probability of a token, in nats: the largest difference of 80 responses
# between two ways to pack them (12 layers, random weights), divided by the root of their length.
TOKEN_ROUNDING = {"fp32": 1e-5, "bf16": 0.06, "fp16": 0.01}
# Relative rounding error of the score of a reward model in fp32.
SCORE_ROUNDING = 1e-6


def pairwise_loss(chosen_scores: Tensor, rejected_scores: Tensor) -> Tensor:
    """Return -log sigmoid(chosen - rejected) (Ouyang et al. 2022, eq. 1). Any shape."""
    return -functional.logsigmoid(chosen_scores - rejected_scores)


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
    as_labeled = pairwise_loss(chosen_rewards, rejected_rewards)
    flipped = pairwise_loss(rejected_rewards, chosen_rewards)
    if robust:
        difference = (1 - label_smoothing) * as_labeled - label_smoothing * flipped
        return difference / (1 - 2 * label_smoothing)
    return (1 - label_smoothing) * as_labeled + label_smoothing * flipped


def ipo_loss(chosen_rewards: Tensor, rejected_rewards: Tensor, beta: float) -> Tensor:
    """Return the loss of each pair [B] from implicit rewards [B] (Azar et al. 2023, eq. 17).

    The squared distance of the difference of log ratios, rewards / beta, from 1 / (2 * beta).
    """
    return ((chosen_rewards - rejected_rewards) / beta - 1 / (2 * beta)) ** 2


def log_odds(mean_logprobs: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of p = exp(mean log-probability) (Hong et al. 2024, eq. 4).

    Any shape.
    """
    # A probability of 1 would be infinitely likelier than any other.
    mean_logprobs = mean_logprobs.clamp(max=-1e-6)
    return mean_logprobs - torch.log(-torch.expm1(mean_logprobs))


def kto_loss(
    rewards: Tensor, lengths: Tensor, reference_point: Tensor, settings: PreferenceSettings
) -> Tensor:
    """Return the loss of each row [B], the mean over its responses (Ethayarajh et al. 2024, eq. 8).

    Args:
        rewards: Implicit rewards of good and bad responses [2, B].
        lengths: Their tokens [2, B]; 0 for a response that a row does not have.
        reference_point: The reward that a response is compared with, a scalar.
    """
    good, bad = rewards
    losses = torch.stack(
        [
            settings.desirable_weight * torch.sigmoid(reference_point - good),
            settings.undesirable_weight * torch.sigmoid(bad - reference_point),
        ]
    )
    present = lengths > 0
    return (losses * present).sum(dim=0) / present.sum(dim=0)


def kto_reference_point(rewards: Tensor) -> Tensor:
    """Return beta times the KL estimate of KTO, a scalar (Ethayarajh et al. 2024, section 4.1).

    rewards: implicit rewards of responses to other prompts, any shape.
    """
    return rewards.mean().clamp(min=0)


def response_rewards(
    settings: PreferenceSettings, logprobs: Tensor, ref_logprobs: Tensor | None, lengths: Tensor
) -> Tensor:
    """Return the implicit rewards of responses.

    With a reference model, beta * log(policy / reference) (Rafailov et al. 2023, section 4).

    Args:
        logprobs: Log-probabilities of responses, any shape.
        ref_logprobs: Those under the reference model; None for losses without one.
        lengths: Tokens of the responses.
    """
    means = logprobs / lengths.clamp(min=1)
    if settings.loss == "orpo":
        return log_odds(means)
    if not has_reference(settings.loss):
        return settings.beta * means
    assert ref_logprobs is not None
    if settings.length_normalized:
        return settings.beta * (means - ref_logprobs / lengths.clamp(min=1))
    return settings.beta * (logprobs - ref_logprobs)


def reward_rounding(settings: PreferenceSettings, lengths: Tensor, dtype: str) -> Tensor:
    """Return how far rounding moves implicit rewards, of the shape of lengths.

    The errors of a response's tokens are independent of each other. Of a policy that equals its
    reference model, all rewards are errors.

    Args:
        lengths: Tokens of the responses.
        dtype: What models compute in.
    """
    errors = TOKEN_ROUNDING[dtype] * lengths.clamp(min=1).double().sqrt()
    if settings.length_normalized or not has_reference(settings.loss):
        errors = errors / lengths.clamp(min=1)
    return settings.beta * errors


def preference_losses(
    settings: PreferenceSettings,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    lengths: Tensor,
    reference_point: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the implicit rewards [2, B] of responses and the losses [B] of rows.

    Args:
        logprobs: Log-probabilities of chosen and rejected responses [2, B].
        ref_logprobs: Those under the reference model [2, B]; None for losses without one.
        lengths: Tokens of the responses [2, B].
        reference_point: kto_reference_point of the step, for KTO.
    """
    rewards = response_rewards(settings, logprobs, ref_logprobs, lengths)
    chosen, rejected = rewards
    if settings.loss == "kto":
        assert reference_point is not None
        losses = kto_loss(rewards, lengths, reference_point, settings)
    elif settings.loss == "orpo":
        # Hong et al. 2024, eq. 6 and 7, where beta is lambda.
        losses = settings.beta * pairwise_loss(chosen, rejected)
    elif settings.loss == "simpo":
        # Meng et al. 2024, eq. 6.
        losses = pairwise_loss(chosen - settings.margin, rejected)
    elif settings.loss == "ipo":
        losses = ipo_loss(chosen, rejected, settings.beta)
    else:
        losses = dpo_loss(chosen, rejected, settings.label_smoothing, settings.loss == "robust")
    # Pang et al. 2024, eq. 1; with a coefficient of 1, the loss of ORPO.
    return rewards, losses - settings.sft_coef * (logprobs / lengths.clamp(min=1))[0]


def per_token_loss(chosen_scores: Tensor, rejected_scores: Tensor, mask: Tensor) -> Tensor:
    """Return the loss of each pair [B]: the mean of pairwise_loss over the masked positions.

    Args:
        chosen_scores: [B, R], padded with a response's last score. (This is the loss of
            DeepSpeed-Chat, which reads the scores of padding tokens there.)
        rejected_scores: [B, R], padded likewise.
        mask: bool [B, R].
    """
    losses = pairwise_loss(chosen_scores, rejected_scores) * mask
    return losses.sum(dim=1) / mask.sum(dim=1)


def divergent_positions(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Return the mask [B, R] from the first difference of a pair to the end of the longer response.

    Args:
        tokens: [2B, R], chosen responses first, padded with a response's last token.
        lengths: [2B].
    """
    chosen, rejected = tokens.chunk(2)
    first, second = lengths.chunk(2)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    shorter_ended = columns >= torch.minimum(first, second)[:, None]
    diverged = ((chosen != rejected) | shorter_ended).cumsum(dim=1) > 0
    return diverged & (columns < torch.maximum(first, second)[:, None])


# --- metrics --------------------------------------------------------------------------------------


class StepScores:
    """Losses [B] and scores [2, B] of the rows of a step, which all ranks add to.

    Args:
        rows: Row numbers of the step [B].
    """

    def __init__(self, rows: np.ndarray, device: torch.device) -> None:
        self.places = {int(row): place for place, row in enumerate(rows)}
        self.table = torch.zeros(3, len(rows), device=device)

    def add(self, micro_batch: MicroBatch, losses: Tensor, scores: Tensor) -> None:
        """Add the losses and scores of the rows of a micro-batch."""
        if micro_batch.counted:
            places = torch.tensor([self.places[row] for row in micro_batch.rows])
            values = torch.cat([losses.detach()[None], scores.detach()]).float()
            self.table.index_copy_(1, copy_to_device(places, self.table.device), values)

    def gathered(self) -> tuple[Tensor, Tensor]:
        """Return the losses and the scores of all ranks, on the CPU in float64."""
        table = all_reduce_sum(self.table).double().cpu()
        return table[0], table[1:]


def pair_metrics(
    losses: Tensor, scores: Tensor, rounding: Tensor | float = 0.0
) -> dict[str, float]:
    """Return the metrics of pairs. A tie counts as incorrect.

    Args:
        losses: [B].
        scores: [2, B], of chosen and rejected responses.
        rounding: Rounding error of a margin, which makes a tie of a smaller one: [B] or a number.
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
    """Return the metrics of labelled responses.

    What needs good and bad responses is omitted if there are only good ones or only bad ones.

    Args:
        losses: [B].
        scores: [2, B], of good and bad responses.
        present: bool [2, B], which of them there are.
        rounding: Scores that differ by no more are ties.
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

    The mean over good responses, of bad ones as the others, is the area under the ROC curve: the
    probability that a good response scores higher than a bad one.
    """
    others = others.sort().values
    below = torch.searchsorted(others, scores - rounding)
    not_above = torch.searchsorted(others, scores + rounding, right=True)
    return (below + not_above).double() / 2 / len(others)
