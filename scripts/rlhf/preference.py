"""Losses of preference pairs: tensors in, tensors out."""

from torch.nn import functional


def pairwise_loss(chosen_scores, rejected_scores):
    """-log sigmoid(chosen - rejected) of each pair [B] (Ouyang et al. 2022, eq. 1)."""
    return -functional.logsigmoid(chosen_scores - rejected_scores)


def accuracy_and_ties(chosen_scores, rejected_scores):
    """Share of pairs with chosen > rejected, and of ties, which are no success. Scores: [B]."""
    return (
        (chosen_scores > rejected_scores).float().mean().item(),
        (chosen_scores == rejected_scores).float().mean().item(),
    )
