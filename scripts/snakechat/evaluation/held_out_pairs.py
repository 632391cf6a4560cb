"""Metrics of held-out pairs and of held-out labelled responses (KTO), with their intervals.

Shapes: n rows.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snakechat.algorithms.preference import labelled_metrics, pair_metrics, placements
from snakechat.data.ragged_arrays import Ragged, whole_lengths_path
from snakechat.evaluation.intervals import clusters_of, mean_with_interval, share_interval
from snakechat.training.metric_logs import write_json
from snakechat.workflow.job import Job

# As in Guo et al. 2017.
CALIBRATION_BINS = 15


def calibration(margins: Tensor, num_bins: int) -> tuple[list[dict[str, Any]], float]:
    """Return the calibration of a reward model: its bins and the expected calibration error.

    The confidence of a pair is sigmoid(|margin|), from 1/2 to 1: the probability of the response
    with the higher score under the Bradley-Terry model. The error is the mean distance of accuracy
    and confidence (Guo et al. 2017, eq. 3). Empty bins are omitted.

    margins: [n], chosen - rejected score.
    """
    confidences = torch.sigmoid(margins.abs())
    correct = (margins > 0).to(confidences.dtype)
    bin_of = ((confidences - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    bins: list[dict[str, Any]] = []
    for index in range(num_bins):
        inside = bin_of == index
        if inside.any():
            bins.append(
                {
                    "pairs": int(inside.sum()),
                    "confidence": confidences[inside].mean().item(),
                    "accuracy": correct[inside].mean().item(),
                }
            )
    error = sum(b["pairs"] * abs(b["confidence"] - b["accuracy"]) for b in bins) / len(margins)
    return bins, error


def held_out_pair_metrics(
    losses: Tensor, scores: Tensor, lengths: Tensor, rounding: Tensor, clusters: Tensor
) -> dict[str, Any]:
    """Return pair_metrics, the calibration, and the accuracy of choosing the longer response.

    Args:
        losses: [n].
        scores, lengths, rounding: [2, n], of chosen and rejected responses.
        clusters: [n].
    """
    limits = rounding.sum(dim=0)
    margins = scores[0] - scores[1]
    margins = margins.where(margins.abs() > limits, 0)
    bins, error = calibration(margins, CALIBRATION_BINS)
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
        **pair_metrics(losses, scores, limits),
        "calibration": bins,
        "calibration_error": error,
        "longer_wins_accuracy": intervals["longer_wins_accuracy"][0],
        "equal_lengths": (lengths[0] == lengths[1]).double().mean().item(),
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
        for name, table, tied in (
            ("auc", scores, limit),
            ("longer_wins_auc", lengths.double(), 0.0),
        ):
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

    DeLong et al. 1988 have its variance, Obuchowski 1997 has that of clusters.

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


def metrics_by_dataset(
    metrics_of: Callable[..., dict[str, Any]], tensors: list[Tensor], rows_of: Mapping[str, int]
) -> dict[str, Any]:
    """Return the metrics of all rows; of each dataset under by_dataset, if there are several.

    Args:
        metrics_of: One of the two functions above.
        tensors: Its arguments.
        rows_of: {dataset: number of rows}, in the order of the rows.
    """
    metrics = metrics_of(*tensors)
    rows_of = {name: number for name, number in rows_of.items() if number}
    if len(rows_of) > 1:
        splits = (tensor.split(list(rows_of.values()), dim=-1) for tensor in tensors)
        metrics["by_dataset"] = {
            name: metrics_of(*of_dataset)
            for name, *of_dataset in zip(rows_of, *splits, strict=True)
        }
    return metrics


def write_metrics(
    job: Job[Any], losses: Tensor, scores: Tensor, rounding: Tensor, labelled: bool = False
) -> None:
    """Write metrics.json of the rows of the evaluation split, and print a summary.

    Args:
        losses: [n].
        scores: [2, n], of chosen and rejected, or of good and bad responses.
        rounding: Rounding errors of the scores [2, n].
        labelled: Whether the responses are labelled good or bad, and make no pairs.
    """
    tokens = job.inputs["tokens"]
    stats = json.loads((tokens / "stats.json").read_text())
    rows_of = {name: stats["eval"]["kept_of"][name] for name in job.settings.datasets}
    lengths = torch.from_numpy(np.load(whole_lengths_path(tokens, "eval"), allow_pickle=False))
    prompts = Ragged(tokens, "eval.prompt")
    clusters = torch.from_numpy(clusters_of(tuple(prompts[row]) for row in range(len(prompts))))
    metrics_of = held_out_labelled_metrics if labelled else held_out_pair_metrics
    tensors = [losses, scores, lengths, rounding, clusters]
    metrics = metrics_by_dataset(metrics_of, tensors, rows_of)
    write_json(job.result / "metrics.json", metrics)
    summary = ("responses", "share_good", "auc") if labelled else ("accuracy", "ties")
    print(", ".join(f"{name} {metrics[name]:.4g}" for name in summary if name in metrics))
