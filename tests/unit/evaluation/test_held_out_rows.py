"""Metrics of held-out rows against numbers computed by hand, and responses to their prompts."""

import math

import numpy as np
import pytest
import torch

from evaluate_sft import perplexities
from snakechat.evaluation.held_out_rows import (
    PROMPTS,
    calibration_error,
    first_prompts,
    held_out_labelled_metrics,
    held_out_pair_metrics,
    metrics_by_dataset,
)
from snakechat.modeling.batching import Examples


def test_calibration_by_hand():
    # Confidences 0.6, 0.7, 0.9 and 0.95; the second pair is incorrect. Two bins, split at 0.75.
    odds = torch.tensor([6 / 4, 3 / 7, 9, 19], dtype=torch.float64)
    # Mean confidences 0.65 and 0.925, accuracies 1/2 and 1: distances 0.15 and 0.075, of two pairs
    # each.
    assert calibration_error(odds.log(), 2) == pytest.approx((2 * 0.15 + 2 * 0.075) / 4)
    # Ties, which are incorrect, are in the first bin; a confidence of 1 is in the last.
    margins = torch.tensor([0.0, 0.0, 0.0, 1000.0])
    assert calibration_error(margins) == pytest.approx(3 * 0.5 / 4)


LOSSES = torch.tensor([0.5, 1.5, 1.0, 1.0], dtype=torch.float64)
# The third pair is a tie within rounding.
SCORES = torch.tensor([[2.0, 0.0, 1.0, 1.0], [1.0, 3.0, 1.0 - 1e-7, 0.5]], dtype=torch.float64)
# The longer response is chosen once; two pairs have equal lengths.
LENGTHS = torch.tensor([[7, 5, 5, 4], [3, 9, 5, 4]])
ROUNDING = torch.full((2, 4), 1e-6, dtype=torch.float64)
# The last two pairs have the same prompt.
CLUSTERS = torch.tensor([0, 1, 2, 2])


def test_held_out_pairs():
    metrics = held_out_pair_metrics(LOSSES, SCORES, LENGTHS, ROUNDING, CLUSTERS)
    intervals = metrics.pop("intervals_95")
    assert intervals.keys() == {"accuracy", "ties", "longer_wins_accuracy"}
    low, high = intervals["accuracy"]
    assert low < 0.1 and high > 0.9
    error = calibration_error(torch.tensor([1.0, -3.0, 0.0, 0.5], dtype=torch.float64))
    assert metrics == pytest.approx(
        {
            "pairs": 4,
            "loss": 1.0,
            "accuracy": 0.5,
            "ties": 0.25,
            "margin": -0.375,
            "chosen_score": 1.0,
            "rejected_score": 1.375,
            "calibration_error": error,
            "longer_wins_accuracy": 0.25,
        }
    )


def test_labelled_responses_have_no_pairs():
    # Good responses have the scores 2, 1 and 1, bad ones 1, up to rounding, and 3. The score of a
    # response that a row does not have is not a score.
    scores = torch.tensor([[2.0, 0.0, 1.0, 1.0], [0.0, 3.0, 1 + 1e-7, 0.0]], dtype=torch.float64)
    lengths = torch.tensor([[9, 0, 5, 5], [0, 5, 4, 0]])
    tensors = [LOSSES, scores, lengths, ROUNDING, torch.arange(4)]
    metrics = held_out_labelled_metrics(*tensors)
    intervals = metrics.pop("intervals_95")
    assert metrics == pytest.approx(
        {
            "loss": 1.0,
            "responses": 5,
            "share_good": 3 / 5,
            # Of 6 comparisons, 2 > 1 is a win, and two are ties.
            "auc": 2 / 6,
            # Three longer than 4; 9 longer than 5, and two ties of 5.
            "longer_wins_auc": (3 + 1 + 2 / 2) / 6,
            "good_score": 4 / 3,
            "bad_score": 2.0,
        }
    )
    assert all(0 <= low < high <= 1 for low, high in intervals.values())
    # Of good responses alone, there is nothing to compare.
    alone = held_out_labelled_metrics(*(each[..., :1] for each in tensors))
    assert alone == {
        **{"loss": 0.5, "responses": 1, "share_good": 1.0, "good_score": 2.0},
        "intervals_95": {},
    }


def test_perplexities_of_all_rows_and_of_each_dataset():
    # -log p of the whole rows and of their responses, and their tokens. Row 2 is mostly prompt.
    nats = np.array([[8.0, 4.0, 30.0], [4.0, 2.0, 2.0]])
    tables = np.array([nats, nats / 2]), np.array([[4, 4, 100], [2, 2, 1]]), torch.arange(3)
    metrics = metrics_by_dataset(perplexities, {"a": 2, "empty": 0, "b": 1}, *tables)
    assert metrics["rows"] == 3
    assert metrics["before"]["response_perplexity"] == pytest.approx(math.exp(8 / 5))
    assert metrics["after"]["perplexity"] == pytest.approx(math.exp(21 / 108))
    assert (metrics["after"]["response_tokens"], metrics["after"]["tokens"]) == (5, 108)
    assert list(metrics["by_dataset"]) == ["a", "b"]
    a, b = metrics["by_dataset"].values()
    assert (a["rows"], b["rows"]) == (2, 1)
    assert b["before"]["response_perplexity"] == pytest.approx(math.exp(2))
    # Ratio 6 / 4, residuals 1 and -1, Student's t of one degree of freedom 12.706.
    half = 12.7062 * math.sqrt(2 * 2) / 4
    assert a["intervals_95"]["before"]["response_perplexity"] == pytest.approx(
        [math.exp(1.5 - half), math.exp(1.5 + half)], rel=1e-3
    )
    # One row has no interval.
    assert b["intervals_95"] == {"before": {}, "after": {}}
    assert metrics_by_dataset(dict, {"a": 3, "empty": 0}) == {}


def test_the_first_different_prompts_are_chosen():
    prompts = [[5, number // 2] for number in range(2 * PROMPTS + 4)]
    assert first_prompts(Examples(prompts, prompts)) == list(range(0, 2 * PROMPTS, 2))
    assert first_prompts(Examples([[5]] * 3, [[6]] * 3)) == [0]
