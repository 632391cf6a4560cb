"""Preference pairs: their losses and figures, tensors in, tensors out.

Shapes: B pairs, R tokens of the longest response.
"""

import torch
from torch.nn import functional

# As many as Guo et al. draw.
CALIBRATION_BINS = 15


def pairwise_loss(chosen_scores, rejected_scores):
    """-log sigmoid(chosen - rejected) of each pair [B] (Ouyang et al. 2022, eq. 1)."""
    return -functional.logsigmoid(chosen_scores - rejected_scores)


def implicit_rewards(logprobs, ref_logprobs, beta):
    """beta * log(policy / reference) of whole responses, any shape (Rafailov et al. 2023, sec. 4)."""
    return beta * (logprobs - ref_logprobs)


def dpo_loss(chosen_rewards, rejected_rewards, label_smoothing):
    """Loss of each pair [B], of implicit rewards (Rafailov et al. 2023, eq. 7).

    label_smoothing: share of pairs that may be labelled the wrong way round; 0 is plain DPO
    (Mitchell 2023, a note on DPO with noisy preferences, eq. 3).
    """
    right = pairwise_loss(chosen_rewards, rejected_rewards)
    wrong = pairwise_loss(rejected_rewards, chosen_rewards)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def per_token_loss(chosen_scores, rejected_scores, compared):
    """Loss of each pair [B]: pairwise_loss at each place that is compared, and its mean.

    Scores: [B, R], a response's last one repeated behind its end; compared: [B, R] (bool). As
    DeepSpeed-Chat does, but that it reads scores of padding behind the end of the shorter response.
    """
    losses = pairwise_loss(chosen_scores, rejected_scores) * compared
    return losses.sum(dim=1) / compared.sum(dim=1)


def since_parting(tokens, lengths):
    """Places [B, R] from the first in which two responses differ to the end of the longer one.

    tokens: [2B, R], chosen ones first, a response's last one repeated behind its end; lengths: [2B].
    """
    chosen, rejected = tokens.chunk(2)
    longest = torch.maximum(*lengths.chunk(2))
    places = torch.arange(tokens.shape[1], device=tokens.device)
    ended = places >= torch.minimum(*lengths.chunk(2))[:, None]
    parted = ((chosen != rejected) | ended).cumsum(dim=1) > 0
    return parted & (places < longest[:, None])


PAIR_FIGURES = ("loss", "accuracy", "ties", "margin", "chosen_score", "rejected_score")


def pair_sums(losses, chosen_scores, rejected_scores):
    """Sums over pairs [6] of PAIR_FIGURES. Arguments: [B]. A tie is no success."""
    return torch.stack(
        [
            losses.sum(),
            (chosen_scores > rejected_scores).sum(),
            (chosen_scores == rejected_scores).sum(),
            (chosen_scores - rejected_scores).sum(),
            chosen_scores.sum(),
            rejected_scores.sum(),
        ]
    )


def calibration(margins, bins):
    """How often a model is right when it is so sure: a list of bins, and the expected error.

    Sure is sigmoid(|margin|), from 1/2 to 1, the probability that a Bradley-Terry model gives to
    its own choice. The error is the mean distance of accuracy and confidence (Guo et al. 2017,
    eq. 3).
    """
    confidences = torch.sigmoid(margins.abs())
    right = (margins > 0).to(confidences.dtype)
    number = ((confidences - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    found = []
    for index in range(bins):
        inside = number == index
        if inside.any():
            found.append(
                {
                    "pairs": int(inside.sum()),
                    "confidence": confidences[inside].mean().item(),
                    "accuracy": right[inside].mean().item(),
                }
            )
    error = sum(b["pairs"] * abs(b["confidence"] - b["accuracy"]) for b in found) / len(margins)
    return found, error


def held_out_figures(losses, scores, lengths):
    """The figures of held-out pairs: PAIR_FIGURES, calibration, and what the longer response tells.

    losses: [n]; scores, lengths: [2, n], of chosen and rejected responses.
    """
    count = len(losses)
    figures = dict(zip(PAIR_FIGURES, (pair_sums(losses, *scores) / count).tolist(), strict=True))
    bins, error = calibration(scores[0] - scores[1], CALIBRATION_BINS)
    longer = dict(zip(PAIR_FIGURES, (pair_sums(losses, *lengths) / count).tolist(), strict=True))
    return {
        "pairs": count,
        **figures,
        "calibration": bins,
        "calibration_error": error,
        "longer_wins_accuracy": longer["accuracy"],
        "equal_lengths": longer["ties"],
    }


def figures_by_dataset(losses, scores, lengths, kept_of):
    """held_out_figures of all pairs, and under "of" those of each dataset where there are several.

    kept_of: {dataset: pairs}, in the order in which they stand.
    """
    figures = held_out_figures(losses, scores, lengths)
    kept_of = {name: number for name, number in kept_of.items() if number}
    if len(kept_of) > 1:
        sizes = list(kept_of.values())
        parts = (each.split(sizes, dim=-1) for each in (losses, scores, lengths))
        figures["of"] = {
            name: held_out_figures(*part) for name, *part in zip(kept_of, *parts, strict=True)
        }
    return figures
