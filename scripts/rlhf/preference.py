"""Losses of preference pairs: tensors in, tensors out."""

from torch.nn import functional


def pairwise_loss(chosen_scores, rejected_scores):
    """-log sigmoid(chosen - rejected) of each pair [B] (Ouyang et al. 2022, eq. 1)."""
    return -functional.logsigmoid(chosen_scores - rejected_scores)


def implicit_rewards(logprobs, ref_logprobs, beta):
    """beta * log(policy / reference) of whole answers, any shape (Rafailov et al. 2023, sec. 4)."""
    return beta * (logprobs - ref_logprobs)


def dpo_loss(chosen_rewards, rejected_rewards, label_smoothing):
    """Loss of each pair [B], of implicit rewards (Rafailov et al. 2023, eq. 7).

    label_smoothing: share of pairs that may be labelled the wrong way round; 0 is plain DPO
    (Mitchell 2023, a note on DPO with noisy preferences, eq. 3).
    """
    right = pairwise_loss(chosen_rewards, rejected_rewards)
    wrong = pairwise_loss(rejected_rewards, chosen_rewards)
    return (1 - label_smoothing) * right + label_smoothing * wrong


def accuracy_and_ties(chosen_scores, rejected_scores):
    """Share of pairs with chosen > rejected, and of ties, which are no success. Scores: [B]."""
    return (
        (chosen_scores > rejected_scores).float().mean().item(),
        (chosen_scores == rejected_scores).float().mean().item(),
    )
