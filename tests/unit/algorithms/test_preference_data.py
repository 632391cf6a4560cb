"""Rows of DPO: losses and reference points of the right rows, against single forward passes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from snakechat.algorithms.preference_data import PreferenceData
from snakechat.data.ragged_arrays import open_ragged
from snakechat.modeling.forward import Policy
from support.configs import load

PROMPTS = [[2, 10], [2, 20, 21], [2, 30]]
# A pair, a good response, a bad one.
CHOSEN = [[11, 12, 2], [22, 2], []]
REJECTED = [[13, 2], [], [31, 32, 33, 2]]
# The first response of the next row; at most 5 tokens with the prompt.
MISMATCHED = [[22, 2], [31, 32], [11, 12, 2]]
BETA = 0.5


@pytest.fixture
def data(model, tmp_path):
    """KTO on three rows; the log-probabilities under the reference model differ clearly."""
    for name, rows in (("prompt", PROMPTS), ("chosen", CHOSEN), ("rejected", REJECTED)):
        with open_ragged(tmp_path, f"train.{name}", 300) as write_rows:
            write_rows(rows)
    np.save(tmp_path / "train.npy", REFERENCE[None])
    np.save(tmp_path / "train.mismatched.npy", MISMATCHED_REFERENCE[None])
    recipe = {"loss": "kto", "beta": BETA, "max_length": 5, "dtype": "fp32"}
    settings = load({"dpo": {"recipes": {"tiny": recipe}}}).program_settings("dpo", "tiny")
    settings = SimpleNamespace(**settings)
    return PreferenceData(settings, {"tokens": tmp_path, "reference": tmp_path}, "train")


REFERENCE = np.array([[-1.0, -2.0, 0.0], [-4.0, 0.0, -8.0]], np.float32)
MISMATCHED_REFERENCE = np.array([[-16.0, -32.0, -64.0]], np.float32)


def logprob(model, prompt, response):
    """The log-probability of one response by itself."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0].double().log_softmax(dim=-1)
    positions = range(len(prompt) - 1, len(prompt) + len(response) - 1)
    return sum(logits[at, token].item() for at, token in zip(positions, response, strict=True))


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1]])
def test_the_reference_point_is_that_of_the_given_rows(rows, data, model):
    point = data.reference_point(Policy(model), np.array(rows))
    rewards = [
        BETA * (logprob(model, PROMPTS[row], MISMATCHED[row]) - MISMATCHED_REFERENCE[0, row])
        for row in rows
    ]
    assert point.item() == pytest.approx(max(0, np.mean(rewards)), rel=1e-5)


def test_rewards_and_losses_are_those_of_the_given_rows(data, model):
    rows = [2, 0]
    logprobs = torch.tensor([[0.0, -3.0], [-5.0, -6.0]])
    rewards, losses = data.losses(logprobs, rows, torch.tensor(1.0))
    assert rewards.tolist() == [[0, BETA * (-3 + 1)], [BETA * (-5 + 8), BETA * (-6 + 4)]]

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    # The bad response alone; the mean of a pair.
    assert losses.tolist() == pytest.approx([sigmoid(0.5), (sigmoid(2) + sigmoid(-2)) / 2])
