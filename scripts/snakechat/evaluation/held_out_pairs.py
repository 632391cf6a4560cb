"""Metrics of held-out pairs and of held-out labelled responses (KTO), with their intervals.

Shapes: n rows.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from snakechat.algorithms.preference import labelled_metrics, pair_metrics, placements
from snakechat.data.ragged_arrays import whole_lengths_path
from snakechat.evaluation.held_out_rows import write_metrics
from snakechat.evaluation.intervals import mean_with_interval, share_interval
from snakechat.workflow.job import Job

# As in Guo et al. 2017.
CALIBRATION_BINS = 15


def calibration_error(margins: Tensor, num_bins: int = CALIBRATION_BINS) -> float:
    """Return the expected calibration error of a reward model (Guo et al. 2017, eq. 3).

    The confidence of a pair is sigmoid(|margin|), from 1/2 to 1: the probability of the response
    with the higher score under the Bradley-Terry model. The error is the mean distance of accuracy
    and confidence, over bins of pairs with similar confidences.

    margins: [n], chosen - rejected score.
    """
    confidences = torch.sigmoid(margins.abs())
    correct = (margins > 0).to(confidences.dtype)
    bin_of = ((confidences - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    distances = confidences.new_zeros(num_bins).index_add(0, bin_of, correct - confidences)
    return (distances.abs().sum() / len(margins)).item()


def pair_margins(scores: Tensor, rounding: Tensor) -> Tensor:
    """Return chosen - rejected score [n] of scores [2, n]; 0 within rounding errors [2, n]."""
    margins = scores[0] - scores[1]
    return margins.where(margins.abs() > rounding.sum(dim=0), 0)


def held_out_pair_metrics(
    losses: Tensor, scores: Tensor, lengths: Tensor, rounding: Tensor, clusters: Tensor
) -> dict[str, Any]:
    """Return pair_metrics, calibration_error, and the accuracy of choosing the longer response.

    Args:
        losses: [n].
        scores, lengths, rounding: [2, n], of chosen and rejected responses.
        clusters: [n].
    """
    margins = pair_margins(scores, rounding)
    shares = {
        "accuracy": margins > 0,
        "ties": margins == 0,
        "longer_wins_accuracy": lengths[0] > lengths[1],
    }
    intervals = {
        name: mean_with_interval(values.numpy(), clusters.numpy())
        for name, values in shares.items()
    }
    return {
        "pairs": len(losses),
        **pair_metrics(losses, scores, rounding.sum(dim=0)),
        "calibration_error": calibration_error(margins),
        "longer_wins_accuracy": intervals["longer_wins_accuracy"][0],
        "intervals_95": {name: interval for name, (_, interval) in intervals.items()},
    }


def held_out_labelled_metrics(
    losses: Tensor, scores: Tensor, lengths: Tensor, rounding: Tensor, clusters: Tensor
) -> dict[str, Any]:
    """Return labelled_metrics; and longer_wins_auc, the AUC of the length as a score.

    Arguments as of held_out_pair_metrics, of good and bad responses. Those with a length of 0 do
    not exist.
    """
    present = lengths > 0
    limit = 2 * rounding[present].mean().item()
    metrics: dict[str, Any] = labelled_metrics(losses, scores, present, limit)
    metrics["intervals_95"] = {}
    if present.any(dim=1).all():
        tables = {"auc": (scores, limit), "longer_wins_auc": (lengths.double(), 0.0)}
        for name, (table, tied) in tables.items():
            metrics[name], metrics["intervals_95"][name] = auc_with_interval(
                (table[0][present[0]], table[1][present[1]]),
                (clusters[present[0]], clusters[present[1]]),
                tied,
            )
    return metrics


def auc_with_interval(
    scores: tuple[Tensor, Tensor], clusters: tuple[Tensor, Tensor], rounding: float = 0.0
) -> tuple[float, list[float]]:
    """Return the area under the ROC curve and its 95 % interval.

    DeLong et al. 1988 have its variance, Obuchowski 1997 its variance over clusters.

    Args:
        scores: Of good and of bad responses, at least one each.
        clusters: Their clusters.
        rounding: Scores that differ by no more are ties.
    """
    good, bad = scores
    of_good, of_bad = placements(good, bad, rounding), 1 - placements(bad, good, rounding)
    auc = of_good.mean().item()
    influences = torch.cat([(of_good - auc) / len(good), (of_bad - auc) / len(bad)])
    # The fewer of the two determine the degrees of freedom.
    count = min(len(each.unique()) for each in clusters)
    interval = share_interval(auc, influences.numpy(), torch.cat(clusters).numpy(), count)
    return auc, interval


def write_pair_metrics(
    job: Job[Any], losses: Tensor, scores: Tensor, rounding: Tensor, labelled: bool = False
) -> None:
    """Write metrics.json of the rows of the evaluation split, and print a summary.

    Args:
        losses: [n].
        scores: [2, n], of chosen and rejected, or of good and bad responses.
        rounding: Rounding errors of the scores [2, n].
        labelled: Whether the responses are labelled good or bad, and make no pairs.
    """
    path = whole_lengths_path(job.inputs["tokens"], "eval")
    tensors = losses, scores, torch.from_numpy(np.load(path, allow_pickle=False)), rounding
    metrics_of = held_out_labelled_metrics if labelled else held_out_pair_metrics
    metrics = write_metrics(
        job,
        lambda clusters, rows: metrics_of(
            *(tensor[..., rows] for tensor in (*tensors, torch.from_numpy(clusters)))
        ),
    )
    summary = ("responses", "share_good", "auc") if labelled else ("accuracy", "ties")
    print(", ".join(f"{name} {metrics[name]:.4g}" for name in summary if name in metrics))
