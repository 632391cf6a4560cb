"""Advantages of the algorithms without a critic, which compare responses to the same prompt.

Pure functions of tensors. Shapes: A responses to each of n prompts: [A, n].
"""

import torch
from torch import Tensor


def rloo_advantages(scores: Tensor) -> Tensor:
    """Return advantages [A, n] of scores [A, n]: score - mean score of the other responses, A > 1.

    REINFORCE leave-one-out (Kool et al. 2019; for language models Ahmadian et al. 2024). The
    baseline of a response does not depend on it, so that the gradient is unbiased. Prompts whose
    responses have equal scores have advantages of exactly 0, and so has a score of NaN, which is
    not compared with the others.
    """
    scores, judged = _relative_scores(scores)
    counts = judged.sum(dim=0)
    others = (scores.sum(dim=0) - scores) / (counts - 1).clamp(min=1)
    return (scores - others) * (judged & (counts > 1))


def grpo_advantages(scores: Tensor, scale_by_std: bool) -> Tensor:
    """Return advantages [A, n] of scores [A, n]: score - mean score of the prompt, A > 1.

    Prompts whose responses have equal scores have advantages of exactly 0, and so has a score of
    NaN, which is not compared with the others.

    scale_by_std: divide by the standard deviation of the prompt's scores + 1e-4 (Shao et al. 2024,
    section 4.1.2). The paper does not define the standard deviation: as in TRL it is the one of a
    sample (divided by A - 1), and 1e-4 is TRL's constant. Dr. GRPO (Liu et al. 2025) does not
    divide, because the division gives prompts that are nearly always or never solved more weight.
    """
    scores, judged = _relative_scores(scores)
    counts = judged.sum(dim=0)
    advantages = (scores - scores.sum(dim=0) / counts.clamp(min=1)) * judged
    if scale_by_std:
        variances = advantages.square().sum(dim=0) / (counts - 1).clamp(min=1)
        advantages = advantages / (variances.sqrt() + 1e-4)
    return advantages


def uniform_groups(scores: Tensor) -> Tensor:
    """Return whether all responses to a prompt have equal scores: bool [n] of scores [A, n].

    NaN equals any score.
    """
    return (_relative_scores(scores)[0] == 0).all(dim=0)


def _relative_scores(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores [A, n] minus the first one of the prompt, 0 for NaN, and which are not NaN.

    Equal scores are then exactly 0: without a rounding error, which the division by 1e-4 would
    amplify.
    """
    judged = ~scores.isnan()
    first = scores.gather(0, judged.int().argmax(dim=0, keepdim=True))
    return (scores - first).nan_to_num(), judged


def overlong_penalties(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Return the penalty of long responses, from 0 to 1: float of the shape of lengths.

    It rises linearly over the last `buffer` tokens before max_length (Yu et al. 2025, eq. 13, with
    the sign reversed). A buffer of 0 penalizes none.
    """
    if buffer == 0:
        return torch.zeros_like(lengths, dtype=torch.float32)
    return ((lengths - (max_length - buffer)) / buffer).clamp(0, 1)
