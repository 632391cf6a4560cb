"""Checks of RLHF: degenerate responses and scores."""

import json
from types import SimpleNamespace

import pytest
import torch

from snakechat.algorithms import step_metrics
from snakechat.algorithms.step_metrics import SanityChecks
from snakechat.workflow.errors import InputError


def rollouts_of(*responses):
    """Rollouts of responses, given as (number of tokens, whether the last one is eos)."""
    lengths, ended = zip(*responses, strict=True)
    return SimpleNamespace(lengths=torch.tensor(lengths), ended=torch.tensor(ended))


def test_only_empty_responses_are_an_error():
    with pytest.raises(InputError, match="step 4: all 3 responses are empty"):
        SanityChecks(True).check_responses(rollouts_of((1, True), (1, True), (1, True)), 4)
    for other in ((2, True), (1, False)):
        SanityChecks(True).check_responses(rollouts_of((1, True), other), 4)


def test_unended_responses_are_counted_until_one_ends(monkeypatch):
    monkeypatch.setattr(step_metrics, "MAX_UNENDED", 6)
    unended, one_ended = rollouts_of((4, False), (4, False)), rollouts_of((4, False), (2, True))
    check = SanityChecks(True)
    for step, expected in enumerate((2, 4, 0, 2, 4), start=1):
        check.check_responses(one_ended if step == 3 else unended, step)
        assert check.num_unended == expected
    with pytest.raises(InputError, match="step 6: none of the last 6 responses ended"):
        check.check_responses(unended, 6)


def test_equal_scores_of_a_reward_model_are_an_error():
    with pytest.raises(InputError, match="step 1: all 4 responses so far have the score"):
        SanityChecks(has_rewards=True).check_scores(torch.full((4,), 0.1), 1)


def test_a_function_may_return_equal_scores_for_a_while(monkeypatch):
    monkeypatch.setattr(step_metrics, "MAX_EQUAL_SCORES", 10)
    equal = torch.zeros(4)
    check = SanityChecks(has_rewards=False)
    check.check_scores(equal, 1)
    restored = SanityChecks(has_rewards=False)
    restored.load_state_dict(json.loads(json.dumps(check.state_dict())))
    restored.check_scores(equal, 2)
    with pytest.raises(InputError, match="step 3: all 12 responses so far have the score 0:"):
        restored.check_scores(equal, 3)
    # Another score than in earlier steps is a difference, after which any scores are accepted.
    check.check_scores(equal + 1, 2)
    for step in range(3, 9):
        check.check_scores(equal, step)
