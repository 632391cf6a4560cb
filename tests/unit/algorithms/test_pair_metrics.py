"""Metrics of preference pairs, against numbers computed by hand."""

import pytest
import torch

from snakechat.algorithms.pair_metrics import (
    calibration,
    held_out_metrics,
    metrics_by_dataset,
)


def test_calibration_by_hand():
    # Confidences 0.6, 0.7, 0.9 and 0.95; the second pair is incorrect. Two bins, split at 0.75.
    odds = torch.tensor([6 / 4, 3 / 7, 9, 19], dtype=torch.float64)
    bins, error = calibration(odds.log(), 2)
    assert [each["pairs"] for each in bins] == [2, 2]
    assert [each["confidence"] for each in bins] == pytest.approx([0.65, 0.925])
    assert [each["accuracy"] for each in bins] == [0.5, 1.0]
    # Distances 0.15 and 0.075, of two pairs each.
    assert error == pytest.approx((2 * 0.15 + 2 * 0.075) / 4)


def test_empty_bins_are_omitted():
    # Ties, which are incorrect, are in the first bin; a confidence of 1 is in the last.
    bins, error = calibration(torch.tensor([0.0, 0.0, 0.0, 1000.0]), 15)
    assert bins == [
        {"pairs": 3, "confidence": 0.5, "accuracy": 0.0},
        {"pairs": 1, "confidence": 1.0, "accuracy": 1.0},
    ]
    assert error == pytest.approx(3 * 0.5 / 4)


LOSSES = torch.tensor([0.5, 1.5, 1.0, 1.0], dtype=torch.float64)
SCORES = torch.tensor([[2.0, 0.0, 1.0, 1.0], [1.0, 3.0, 1.0, 0.5]], dtype=torch.float64)
# The longer response is chosen once; two pairs have equal lengths.
LENGTHS = torch.tensor([[7, 5, 5, 4], [3, 9, 5, 4]])


def test_held_out_metrics():
    metrics = held_out_metrics(LOSSES, SCORES, LENGTHS)
    bins, error = calibration(SCORES[0] - SCORES[1], 15)
    assert metrics == {
        "pairs": 4,
        "loss": 1.0,
        "accuracy": 0.5,
        "ties": 0.25,
        "margin": -0.375,
        "chosen_score": 1.0,
        "rejected_score": 1.375,
        "calibration": bins,
        "calibration_error": error,
        "longer_wins_accuracy": 0.25,
        "equal_lengths": 0.5,
    }
    assert sum(each["pairs"] for each in bins) == 4


def test_several_datasets_additionally_have_metrics_each():
    metrics = metrics_by_dataset(LOSSES, SCORES, LENGTHS, {"b": 1, "none": 0, "a": 3})
    together = held_out_metrics(LOSSES, SCORES, LENGTHS)
    assert metrics == together | {
        "by_dataset": {
            "b": held_out_metrics(LOSSES[:1], SCORES[:, :1], LENGTHS[:, :1]),
            "a": held_out_metrics(LOSSES[1:], SCORES[:, 1:], LENGTHS[:, 1:]),
        }
    }
    assert metrics["by_dataset"]["a"]["accuracy"] == pytest.approx(1 / 3)
    assert metrics_by_dataset(LOSSES, SCORES, LENGTHS, {"b": 4}) == together
