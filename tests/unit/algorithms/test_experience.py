"""Rewards, advantages and importance weights of a step, by hand; checks that stop a training."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from snakechat.algorithms import experience as module
from snakechat.algorithms.experience import RlhfState, TokenEvaluation, make_experience
from snakechat.config.rlhf import RlhfSettings, evaluated_in_update
from snakechat.workflow.errors import InputError
from support.configs import load

# Two responses to each of three prompts: all first responses, then all second ones.
MASK = torch.ones(6, 1, dtype=torch.bool)
SCORES = torch.tensor([1.0, 10.0, 100.0, 3.0, 40.0, 500.0])


def make_settings(**recipe):
    """Return the settings of a recipe, by default RLOO with two responses to each prompt."""
    recipe = {"actor": "sft/tiny", "algorithm": "rloo", "num_generations": 2, **recipe}
    config = load({"rlhf": {"recipes": {"mine": recipe}}})
    return RlhfSettings(**config.program_settings("rlhf", "mine"))


@pytest.mark.parametrize(
    ("changes", "step", "expected"),
    [
        ({}, (), True),
        # Half of the responses of a step, and a last step with as many.
        ({"global_batch_size": 32}, (), False),
        ({"global_batch_size": 32}, (32, 9), True),
        ({"ppo_epochs": 2}, (), False),
        ({"generation_backend": "vllm", "importance_sampling_cap": 2.0}, (), False),
        ({"drop_uniform_groups": True}, (), False),
        ({"kl_in": "rewards", "kl_estimator": "k1"}, (), False),
        ({"kl_in": None, "kl_estimator": None, "kl_coef": 0}, (), True),
        ({"algorithm": "ppo", "num_generations": 1, "critic_warmup_steps": 3}, (64, 3), False),
        ({"algorithm": "ppo", "critic_warmup_steps": 3}, (64, 4), True),
    ],
)
def test_a_single_update_evaluates_the_actor_itself(changes, step, expected):
    sizes = {"rollout_batch_size": 32, "global_batch_size": 64}
    sizes |= {"kl_in": "loss", "kl_estimator": "k3"}
    assert evaluated_in_update(make_settings(**sizes | changes), *step) is expected


def make_evaluation(logprobs, ref_logprobs, values=None):
    return TokenEvaluation(logprobs, torch.zeros_like(logprobs), ref_logprobs, values)


def make_rollouts(mask, sampler_logprobs=None):
    return SimpleNamespace(response_mask=mask, sampler_logprobs=sampler_logprobs)


# The defaults, and a preset with the KL in the loss.
@pytest.mark.parametrize(("algorithm", "preset"), [("rloo", None), ("grpo", "dr_grpo")])
def test_a_group_with_equal_or_missing_scores_has_advantages_of_0(algorithm, preset):
    settings = make_settings(preset=preset, algorithm=algorithm)
    # The second prompt has equal scores, at different distances from the reference; a response to
    # the third one has none.
    scores = torch.tensor([1.0, 0.3, math.nan, 3.0, 0.3, 500.0])
    evaluation = make_evaluation(torch.randn(6, 1), torch.randn(6, 1))
    experience = make_experience(
        settings, make_rollouts(MASK), evaluation, scores, settings.kl_coef
    )
    assert experience.is_uniform.tolist() == [False, True, True]
    assert (experience.advantages[:, 0] == 0).tolist() == [False, True, True] * 2


def test_importance_weights_are_1_unless_the_sampler_has_logprobs():
    evaluation = make_evaluation(torch.log(torch.full((6, 1), 0.4)), torch.zeros(6, 1))
    rollouts = make_rollouts(MASK)
    experience = make_experience(make_settings(), rollouts, evaluation, SCORES, 0.1)
    assert experience.importance_weights.tolist() == [[1.0]] * 6
    # Ratios 0.5 and 8, of which the second is capped.
    sampler_logprobs = torch.log(torch.tensor([[0.8], [0.05]] * 3))
    rollouts = make_rollouts(MASK, sampler_logprobs)
    settings = make_settings(generation_backend="vllm")
    experience = make_experience(settings, rollouts, evaluation, SCORES, 0.1)
    assert experience.importance_weights.flatten().tolist() == pytest.approx([0.5, 2.0] * 3)


def test_kl_coef_increases_with_the_kl():
    def adapted(kl_coef, kl, horizon, number):
        state = RlhfState(SimpleNamespace(kl_coef=kl_coef, kl_target=6.0, kl_horizon=horizon))
        state.adapt_kl_coef(torch.full((number,), kl))
        return state.kl_coef

    # Target 6, 512 rollouts, horizon 5,120: a tenth of the error, which ends at 20 %.
    factors = [adapted(1.0, kl, 5120, 512) for kl in (6.0, 6.6, 60.0, -3.0)]
    assert factors == pytest.approx([1, 1.01, 1.02, 0.98])
    # However short the horizon, it changes by a fifth at most.
    assert adapted(0.05, 0.0, 100, 600) == pytest.approx(0.04)


# --- checks ---------------------------------------------------------------------------------------


def state_of(has_rewards):
    return RlhfState(SimpleNamespace(kl_coef=0.1, standardize_scores="none"), has_rewards)


def rollouts_of(*responses):
    """Rollouts of responses, given as (number of tokens, whether the last one is eos)."""
    lengths, ended = zip(*responses, strict=True)
    return SimpleNamespace(lengths=torch.tensor(lengths), ended=torch.tensor(ended))


def test_only_empty_responses_are_an_error():
    with pytest.raises(InputError, match="step 4: all 2 responses are empty"):
        state_of(True).check_responses(rollouts_of((1, True), (1, True)), 4)
    for other in ((2, True), (1, False)):
        state_of(True).check_responses(rollouts_of((1, True), other), 4)


def test_unended_responses_are_counted_until_one_ends(monkeypatch):
    monkeypatch.setattr(module, "MAX_UNENDED", 6)
    unended, one_ended = rollouts_of((4, False), (4, False)), rollouts_of((4, False), (2, True))
    check = state_of(True)
    for rollouts in (unended, unended, one_ended, unended, unended):
        check.check_responses(rollouts, 1)
    with pytest.raises(InputError, match="step 6: none of the last 6 responses ended"):
        check.check_responses(unended, 6)


def test_a_function_may_return_equal_scores_for_a_while(monkeypatch):
    monkeypatch.setattr(module, "MAX_EQUAL_SCORES", 10)
    equal = torch.zeros(4)
    with pytest.raises(InputError, match="step 1: all 4 responses so far have the score"):
        # Those of a reward model always differ.
        state_of(has_rewards=True).add_scores(equal, 1)
    # A single response says nothing.
    state_of(has_rewards=True).add_scores(equal[:1], 1)
    check = state_of(has_rewards=False)
    check.add_scores(equal, 1)
    restored = state_of(has_rewards=False)
    restored.load_state_dict(json.loads(json.dumps(check.state_dict())))
    restored.add_scores(equal, 2)
    with pytest.raises(InputError, match="step 3: all 12 responses so far have the score 0:"):
        restored.add_scores(equal, 3)
    # Another score than in earlier steps is a difference, after which any scores are accepted.
    check.add_scores(equal + 1, 2)
    for step in range(3, 9):
        check.add_scores(equal, step)
