"""Metrics of preference pairs. Shapes: B pairs, n held-out pairs."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from snakechat.data.ragged_arrays import whole_lengths_path
from snakechat.training.metric_logs import write_json
from snakechat.workflow.job import Job

# As in Guo et al. 2017.
CALIBRATION_BINS = 15

PAIR_METRICS = ("loss", "accuracy", "ties", "margin", "chosen_score", "rejected_score")


def pair_metric_sums(losses: Tensor, chosen_scores: Tensor, rejected_scores: Tensor) -> Tensor:
    """Return the sums [6] of PAIR_METRICS over pairs. Arguments: [B]. A tie counts as incorrect."""
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


def pair_metrics(losses: Tensor, scores: Tensor) -> dict[str, float]:
    """Return the means of PAIR_METRICS. losses: [n]; scores: [2, n], of chosen and rejected."""
    means = pair_metric_sums(losses, *scores) / len(losses)
    return dict(zip(PAIR_METRICS, means.tolist(), strict=True))


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


def held_out_metrics(losses: Tensor, scores: Tensor, lengths: Tensor) -> dict[str, Any]:
    """Return PAIR_METRICS, the calibration, and the accuracy of choosing the longer response.

    losses: [n]. scores, lengths: [2, n], of chosen and rejected responses.
    """
    bins, error = calibration(scores[0] - scores[1], CALIBRATION_BINS)
    by_length = pair_metrics(losses, lengths)
    return {
        "pairs": len(losses),
        **pair_metrics(losses, scores),
        "calibration": bins,
        "calibration_error": error,
        "longer_wins_accuracy": by_length["accuracy"],
        "equal_lengths": by_length["ties"],
    }


def metrics_by_dataset(
    losses: Tensor, scores: Tensor, lengths: Tensor, pairs_of: Mapping[str, int]
) -> dict[str, Any]:
    """Return held_out_metrics of all pairs; of each dataset under by_dataset, if there are several.

    pairs_of: {dataset: number of pairs}, in the order of the pairs.
    """
    metrics = held_out_metrics(losses, scores, lengths)
    pairs_of = {name: number for name, number in pairs_of.items() if number}
    if len(pairs_of) > 1:
        sizes = list(pairs_of.values())
        splits = (tensor.split(sizes, dim=-1) for tensor in (losses, scores, lengths))
        metrics["by_dataset"] = {
            name: held_out_metrics(*tensors)
            for name, *tensors in zip(pairs_of, *splits, strict=True)
        }
    return metrics


def write_metrics(job: Job[Any], losses: Tensor, scores: Tensor) -> None:
    """Write metrics.json of the pairs of the evaluation split, and print a summary.

    losses: [n]; scores: [2, n], of chosen and rejected responses.
    """
    tokens = job.inputs["tokens"]
    stats = json.loads((tokens / "stats.json").read_text())
    pairs_of = {name: stats["eval"]["kept_of"][name] for name in job.settings.datasets}
    lengths = np.load(whole_lengths_path(tokens, "eval"), allow_pickle=False)
    metrics = metrics_by_dataset(losses, scores, torch.from_numpy(lengths), pairs_of)
    write_json(job.result / "metrics.json", metrics)
    summary = ("accuracy", "ties", "longer_wins_accuracy")
    print(", ".join(f"{name} {metrics[name]:.4f}" for name in summary))
