"""Losses of preference pairs, against numbers computed by hand and those of TRL."""

import math

import pytest
import torch

from snakechat.algorithms.preference import (
    divergent_positions,
    kto_loss,
    kto_reference_point,
    log_odds,
    per_token_loss,
    preference_losses,
)
from snakechat.config.settings import PreferenceSettings


def kto(**changes):
    settings = {"loss": "kto", "desirable_weight": 1.0, "undesirable_weight": 1.0, "beta": 0.1}
    settings |= {"label_smoothing": 0.0, "length_normalized": False, "margin": 0.0}
    return PreferenceSettings(**settings | {"sft_coef": 0.0} | changes)


def test_the_reference_point_of_kto_is_a_mean_reward_that_is_not_negative():
    assert kto_reference_point(torch.tensor([[3.0, -1.0, 0.5, 1.5]])).item() == 1
    assert kto_reference_point(torch.tensor([[-3.0, 1.0]])).item() == 0


def test_kto_by_hand():
    # A pair; a good response; a bad one. The reference point is 1: distances 1 and 2, -1, and 3.
    rewards = torch.tensor([[2.0, 0.0, 0.0], [-1.0, 0.0, 4.0]], dtype=torch.float64)
    lengths = torch.tensor([[3, 2, 0], [5, 0, 4]])
    settings = kto(desirable_weight=2.0, undesirable_weight=3.0)
    losses = kto_loss(rewards, lengths, torch.tensor(1.0), settings)

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    pair = (2 * sigmoid(-1) + 3 * sigmoid(-2)) / 2
    assert losses.tolist() == pytest.approx([pair, 2 * sigmoid(1), 3 * sigmoid(3)])


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
            {"loss": "ipo", "length_normalized": True},
            MEAN_REWARDS,
            [19.506944444, 29.7025, 45.5625],
        ),
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
    settings = kto(**{"loss": "dpo", "label_smoothing": 0.1} | changes)
    reference = REF_LOGPROBS if settings.loss not in ("simpo", "orpo") else None
    # Responses to other prompts have log ratios of 4 and 3: a KL of 3.5.
    point = torch.tensor(0.35) if settings.loss == "kto" else None
    found_rewards, found = preference_losses(settings, LOGPROBS, reference, LENGTHS, point)
    assert found.tolist() == pytest.approx(losses)
    for row, expected in zip(found_rewards.tolist(), rewards, strict=True):
        assert row == pytest.approx(expected)


# Per-token loss.


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
    chosen = torch.tensor([[9.0, 3.0, 1.0], [4.0, 9.0, 9.0]], requires_grad=True)
    rejected = torch.tensor([[0.0, 1.0, 3.0], [4.0, 0.0, 0.0]])
    mask = torch.tensor([[False, True, True], [True, False, False]])
    losses = per_token_loss(chosen, rejected, mask)
    correct, incorrect = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    assert losses.tolist() == pytest.approx([(correct + incorrect) / 2, math.log(2)])
    losses.sum().backward()
    # -sigmoid(-difference) / number of masked positions.
    slopes = [[0, -1 / (1 + math.exp(2)) / 2, -1 / (1 + math.exp(-2)) / 2], [-0.5, 0, 0]]
    for gradients, expected in zip(chosen.grad.tolist(), slopes, strict=True):
        assert gradients == pytest.approx(expected)


def test_log_odds_by_hand():
    # Odds 3 / 1 and 1 / 9. A probability of 1 is finite.
    odds = log_odds(torch.tensor([0.75, 0.1, 1.0], dtype=torch.float64).log())
    assert odds[:2].tolist() == pytest.approx([math.log(3), -math.log(9)])
    assert math.isfinite(odds[2])
