"""Perplexities of SFT from log-probabilities of rows: by hand, of all rows and of each dataset."""

import math
from functools import partial

import numpy as np
import pytest

from evaluate_sft import perplexities
from snakechat.evaluation.held_out_rows import metrics_by_dataset

# Of three rows: -log p of the whole row and of the response, and their tokens. Row 2 is mostly
# prompt.
NATS = {"": np.array([8.0, 4.0, 30.0]), "response_": np.array([4.0, 2.0, 2.0])}
TOKENS = {"": np.array([4, 4, 100]), "response_": np.array([2, 2, 1])}


@pytest.fixture
def metrics():
    logprobs = {"before": {name: -nats for name, nats in NATS.items()}}
    logprobs["after"] = {name: -nats / 2 for name, nats in NATS.items()}
    metrics_of = partial(perplexities, logprobs, TOKENS, np.arange(3))
    return metrics_by_dataset(metrics_of, {"a": 2, "empty": 0, "b": 1})


def test_prompts_have_no_part_in_the_perplexity_of_responses(metrics):
    assert metrics["rows"] == 3
    assert metrics["before"]["response_perplexity"] == pytest.approx(math.exp(8 / 5))
    assert metrics["after"]["response_perplexity"] == pytest.approx(math.exp(4 / 5))
    assert metrics["after"]["perplexity"] == pytest.approx(math.exp(21 / 108))
    assert (metrics["after"]["response_tokens"], metrics["after"]["tokens"]) == (5, 108)


def test_each_dataset_has_its_perplexities_and_intervals(metrics):
    assert list(metrics["by_dataset"]) == ["a", "b"]
    a, b = metrics["by_dataset"].values()
    assert (a["rows"], b["rows"]) == (2, 1)
    assert a["before"]["response_perplexity"] == pytest.approx(math.exp(6 / 4))
    assert b["before"]["response_perplexity"] == pytest.approx(math.exp(2))
    # Ratio 6 / 4, residuals 1 and -1, Student's t of one degree of freedom 12.706.
    half = 12.7062 * math.sqrt(2 * 2) / 4
    assert a["intervals_95"]["before"]["response_perplexity"] == pytest.approx(
        [math.exp(1.5 - half), math.exp(1.5 + half)], rel=1e-3
    )
    # One row has no interval.
    assert b["intervals_95"] == {"before": {}, "after": {}}
    assert metrics_by_dataset(lambda rows: {}, {"a": 3, "empty": 0}) == {}
