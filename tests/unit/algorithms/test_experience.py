"""Rewards, advantages and importance weights of a step, by hand."""

from types import SimpleNamespace

import pytest
import torch

from snakechat.algorithms.experience import (
    TokenEvaluation,
    compute_advantages,
    make_experience,
)
from snakechat.config.rlhf import RlhfSettings, evaluated_in_update
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


def test_with_a_critic_rewards_may_be_whitened():
    whitening = {"whiten_rewards": True, "whiten_advantages": False}
    settings = make_settings(algorithm="ppo", num_generations=1, **whitening)
    mask = torch.tensor([[True, True], [True, False]])
    # Mean 4 and variance 8/3 over the three tokens, then the mean again.
    rewards = torch.tensor([[2.0, 6.0], [4.0, 0.0]])
    scaled = 2 / (8 / 3) ** 0.5
    advantages, returns = compute_advantages(
        settings, rewards, torch.zeros(2, 2), mask, torch.ones(2, dtype=torch.bool)
    )
    assert returns[0, 1].item() == pytest.approx(4 + scaled)
    assert returns[1].tolist() == pytest.approx([4, 0])
    # Undiscounted, with lambda 0.95.
    assert returns[0, 0].item() == pytest.approx(4 - scaled + 0.95 * (4 + scaled))
    assert torch.equal(advantages, returns)


# Settings of the recipes that compare responses: the defaults, and those of the presets with the KL
# in the loss.
@pytest.mark.parametrize("preset", [None, "dr_grpo"])
@pytest.mark.parametrize("algorithm", ["rloo", "grpo"])
def test_a_group_with_equal_scores_has_advantages_of_0(preset, algorithm):
    settings = make_settings(preset=preset, algorithm=algorithm)
    # The second prompt has equal scores, at different distances from the reference.
    scores = torch.tensor([1.0, 0.3, 100.0, 3.0, 0.3, 500.0])
    evaluation = make_evaluation(torch.randn(6, 1), torch.randn(6, 1))
    experience = make_experience(
        settings, make_rollouts(MASK), evaluation, scores, settings.kl_coef
    )
    assert experience.is_uniform.tolist() == [False, True, False]
    assert (experience.advantages[:, 0] == 0).tolist() == [False, True, False] * 2


def test_importance_weights_are_1_unless_the_sampler_has_logprobs():
    evaluation = make_evaluation(torch.log(torch.full((6, 1), 0.4)), torch.zeros(6, 1))
    rollouts = make_rollouts(MASK)
    experience = make_experience(make_settings(), rollouts, evaluation, SCORES, 0.0)
    assert experience.importance_weights.tolist() == [[1.0]] * 6
    # Ratios 0.5 and 8, of which the second is capped.
    sampler_logprobs = torch.log(torch.tensor([[0.8], [0.05]] * 3))
    rollouts = make_rollouts(MASK, sampler_logprobs)
    settings = make_settings(generation_backend="vllm")
    experience = make_experience(settings, rollouts, evaluation, SCORES, 0.0)
    assert experience.importance_weights.flatten().tolist() == pytest.approx([0.5, 2.0] * 3)
