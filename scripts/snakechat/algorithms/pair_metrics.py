"""Metrics of preference pairs, and of responses that are labelled good or bad (KTO).

Shapes: B pairs or rows. A row of labelled responses has a good response, a bad one or both.
"""

import numpy as np
import torch
from torch import Tensor

from snakechat.modeling.acceleration import copy_to_device
from snakechat.modeling.batching import MicroBatch
from snakechat.workflow.distributed import all_reduce_sum


class StepScores:
    """Losses [B] and scores [2, B] of the rows of a step, which all ranks add to.

    Args:
        rows: Row numbers of the step [B].
    """

    def __init__(self, rows: np.ndarray, device: torch.device) -> None:
        self.places = {int(row): place for place, row in enumerate(rows)}
        self.table = torch.zeros(3, len(rows), device=device)

    def add(self, micro_batch: MicroBatch, losses: Tensor, scores: Tensor) -> None:
        """Add those of the rows of a micro-batch."""
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
