"""Losses of preference pairs, against numbers by hand and the losses of TRL; rows of DPO."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from snakechat.algorithms.preference import (
    PreferenceData,
    divergent_positions,
    log_odds,
    per_token_loss,
    preference_losses,
)
from snakechat.config.settings import PreferenceSettings
from snakechat.data.ragged_arrays import open_ragged
from snakechat.modeling.forward import Policy
from support.configs import load

# Three pairs, chosen responses first.
LOGPROBS = torch.tensor([[-6.0, -10.0, -3.0], [-9.0, -8.0, -2.0]], dtype=torch.float64)
REF_LOGPROBS = torch.tensor([[-7.0, -9.0, -3.5], [-8.0, -8.5, -4.0]], dtype=torch.float64)
LENGTHS = torch.tensor([[3, 5, 2], [4, 2, 1]])
# Implicit rewards: of whole responses, and of their mean log-probabilities.
REWARDS = [[0.1, -0.1, 0.05], [-0.1, 0.05, 0.2]]
MEAN_REWARDS = [[0.1 / 3, -0.02, 0.025], [-0.025, 0.025, 0.2]]
SIMPO_REWARDS = [[-4.0, -4.0, -3.0], [-4.5, -8.0, -4.0]]
ORPO_REWARDS = [[-1.8545865, -1.8545865, -1.2475175], [-2.1386223, -3.9815146, -1.8545865]]


@pytest.mark.parametrize(
    ("changes", "rewards", "losses"),
    [
        # Losses: TRL 0.24 (DPOTrainer.dpo_loss, CPOTrainer.cpo_loss, ORPOTrainer.odds_ratio_loss,
        # KTOTrainer.kto_loss, mean of each pair) for these log-probabilities.
        ({}, REWARDS, [0.618138869, 0.755957048, 0.755957048]),
        ({"length_normalized": True}, MEAN_REWARDS, [0.670239134, 0.711400284, 0.766970431]),
        ({"loss": "robust"}, REWARDS, [0.573138869, 0.789707048, 0.789707048]),
        ({"loss": "ipo"}, REWARDS, [9.0, 42.25, 42.25]),
        (
            {"loss": "simpo", "beta": 2.0, "margin": 1.0},
            SIMPO_REWARDS,
            [0.974076984, 0.0485873516, 0.693147181],
        ),
        ({"loss": "orpo"}, ORPO_REWARDS, [0.0561180132, 0.0112616755, 0.0434988807]),
        (
            {"loss": "kto", "desirable_weight": 1.33},
            REWARDS,
            [0.568527756, 0.618853832, 0.613289351],
        ),
        # The SFT loss: 6 / 3, 10 / 5 and 3 / 2.
        ({"sft_coef": 0.5}, REWARDS, [1.618138869, 1.755957048, 1.505957048]),
    ],
)
def test_preference_losses(changes, rewards, losses):
    settings = {"loss": "dpo", "desirable_weight": 1.0, "undesirable_weight": 1.0, "beta": 0.1}
    settings |= {"label_smoothing": 0.1, "length_normalized": False, "margin": 0.0, "sft_coef": 0.0}
    settings = PreferenceSettings(**settings | changes)
    reference = REF_LOGPROBS if settings.loss not in ("simpo", "orpo") else None
    # Responses to other prompts have log ratios of 4 and 3: a KL of 3.5.
    point = torch.tensor(0.35) if settings.loss == "kto" else None
    found, found_rewards = preference_losses(settings, LOGPROBS, reference, LENGTHS, point)
    assert found.tolist() == pytest.approx(losses)
    for row, expected in zip(found_rewards.tolist(), rewards, strict=True):
        assert row == pytest.approx(expected)


def test_log_odds_are_finite():
    assert math.isfinite(log_odds(torch.zeros(())))


# --- loss of reward models for each token ---------------------------------------------------------


def test_positions_from_the_first_difference_to_the_end_of_the_longer_response():
    pairs = [
        # From the start, at the end.
        ([5, 6, 2], [7, 6, 2], "xxx."),
        ([5, 6, 7], [5, 6, 8], "..x."),
        # One longer than the other.
        ([5, 2], [5, 6, 7, 2], ".xxx"),
        ([5, 6, 7, 2], [5, 2], ".xxx"),
        # One is a prefix of the other.
        ([5, 6], [5, 6, 6, 6], "..xx"),
        # Equal.
        ([5, 6], [5, 6], "...."),
    ]
    chosen, rejected, expected = zip(*pairs, strict=True)
    lengths = torch.tensor([len(ids) for ids in (*chosen, *rejected)])
    # Padded with the last token, as pad_with_last does.
    tokens = [ids + [ids[-1]] * (4 - len(ids)) for ids in (*chosen, *rejected)]
    mask = divergent_positions(torch.tensor(tokens), lengths).tolist()
    assert ["".join(".x"[value] for value in row) for row in mask] == list(expected)


def test_per_token_loss_is_the_mean_over_masked_positions():
    # Differences: 9, 2, -2; and 0, 9, 9.
    chosen = torch.tensor([[9.0, 3.0, 1.0], [4.0, 9.0, 9.0]])
    rejected = torch.tensor([[0.0, 1.0, 3.0], [4.0, 0.0, 0.0]])
    mask = torch.tensor([[False, True, True], [True, False, False]])
    losses = per_token_loss(chosen, rejected, mask)
    correct, incorrect = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    assert losses.tolist() == pytest.approx([(correct + incorrect) / 2, math.log(2)])


# --- rows of DPO ----------------------------------------------------------------------------------

PROMPTS = [[2, 10], [2, 20, 21], [2, 30]]
# A pair, a good response, a bad one.
CHOSEN = [[11, 12, 2], [22, 2], []]
REJECTED = [[13, 2], [], [31, 32, 33, 2]]
# The first response of the next row; at most 5 tokens with the prompt.
MISMATCHED = [[22, 2], [31, 32], [11, 12, 2]]
BETA = 0.5
REFERENCE = np.array([[-1.0, -2.0, 0.0], [-4.0, 0.0, -8.0]], np.float32)
MISMATCHED_REFERENCE = np.array([[-16.0, -32.0, -64.0]], np.float32)


@pytest.fixture
def data(tmp_path):
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


def logprob(model, prompt, response):
    """The log-probability of one response by itself."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0].double().log_softmax(dim=-1)
    positions = range(len(prompt) - 1, len(prompt) + len(response) - 1)
    return sum(logits[at, token].item() for at, token in zip(positions, response, strict=True))


@pytest.mark.parametrize("rows", [[2, 0], [1]])
def test_the_reference_point_is_that_of_the_given_rows(rows, data, model):
    point = data.reference_point(Policy(model), np.array(rows))
    rewards = [
        BETA * (logprob(model, PROMPTS[row], MISMATCHED[row]) - MISMATCHED_REFERENCE[0, row])
        for row in rows
    ]
    assert point.item() == pytest.approx(np.mean(rewards), rel=1e-5)
    # It is never negative.
    data.reference[".mismatched.npy"] *= 0
    assert data.reference_point(Policy(model), np.array(rows)) == 0


def test_rewards_and_losses_are_those_of_the_given_rows(data):
    logprobs = torch.tensor([[0.0, -3.0], [-5.0, -6.0]])
    losses, rewards = data.losses(logprobs, [2, 0], torch.tensor(1.0))
    assert rewards.tolist() == [[0, BETA * (-3 + 1)], [BETA * (-5 + 8), BETA * (-6 + 4)]]
    # The bad response alone, 0.5 above the point; the mean of a pair: sigmoid(2) and sigmoid(-2).
    assert losses.tolist() == pytest.approx([1 / (1 + math.exp(-0.5)), 0.5])
