"""A step of RL, recomputed by loops over single responses: models, grouping, KL, loss, gradient."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

import train_rlhf
from snakechat.algorithms.rollouts import Rollouts
from support.rlhf_training import rlhf_inputs, rlhf_training  # noqa: F401

KL_COEF, TEMPERATURE, GAMMA, GAE_LAMBDA = 0.7, 0.8, 0.9, 0.6
# One update of all responses in each step. From the second step on, the actor is not its reference.
SETTINGS = {
    "rollout_batch_size": 16,
    "max_steps": 2,
    "max_response_length": 6,
    "actor_learning_rate": 0.01,
    "warmup_steps": 0,
    "max_grad_norm": 1e9,
    "kl_coef": KL_COEF,
    "temperature": TEMPERATURE,
    "gamma": GAMMA,
    "gae_lambda": GAE_LAMBDA,
    "whiten_advantages": False,
    "standardize_scores": "none",
    "score_clip": None,
    "missing_eos_penalty": 0.0,
}


@pytest.mark.parametrize(
    ("algorithm", "generations", "kl_in"),
    [
        ("ppo", 1, "rewards"),
        ("rloo", 3, "rewards"),
        ("grpo", 3, "loss"),
        ("distill", 2, "rewards"),
    ],
)
def test_a_step_is_that_of_loops_over_responses(
    algorithm, generations, kl_in, train, inputs, monkeypatch
):
    steps = []
    take_step, metrics_of = train_rlhf.RlhfTrainer.step, train_rlhf.step_metrics
    seen = {}

    def step_metrics(algorithm, rollouts, experience, scores, updates):
        seen.update(rollouts=rollouts, scores=scores)
        return metrics_of(algorithm, rollouts, experience, scores, updates)

    def recorded(self, step, rows):
        critic = self.critic and copy.deepcopy(self.critic.module.model)
        actor = copy.deepcopy(self.actor.module.model)
        outcome = take_step(self, step, rows)
        reward = self.rewards[0].module
        with reward.on_device() as module:
            result = SimpleNamespace(metrics=outcome.metrics, **seen)
            steps.append((actor, critic, copy.deepcopy(module.model), result))
        return outcome

    monkeypatch.setattr(train_rlhf, "step_metrics", step_metrics)
    monkeypatch.setattr(train_rlhf.RlhfTrainer, "step", recorded)
    train(
        algorithm=algorithm,
        num_generations=generations,
        global_batch_size=16 * generations,
        kl_in=kl_in,
        kl_estimator="k1" if kl_in == "rewards" else "k2",
        **SETTINGS,
    )
    reference = steps[0][0]
    if algorithm == "distill":
        reference = AutoModelForCausalLM.from_pretrained(inputs["teacher"]["path"])
    if algorithm == "ppo":
        # The critic starts as the reward model.
        assert torch.equal(steps[0][1].score.weight, steps[0][2].score.weight)
    actor, critic, reward, result = steps[1]
    examples = result.rollouts.examples
    prompts = [[*map(int, prompt)] for prompt in examples.prompts]
    # In the order of the rows of tables: all first responses, then all second ones.
    responses = [
        (number, prompts[number], [*map(int, ids)])
        for generation in examples.responses
        for number, ids in enumerate(generation)
    ]
    assert len(responses) == 16 * generations

    scores, totals, token_rewards, logprobs, penalties = [], [], [], [], []
    token_log_ratios = []
    for _, prompt, response in responses:
        logprobs.append(logprobs_of(actor, prompt, response))
        with torch.no_grad():
            ref_logprobs = logprobs_of(reference, prompt, response)
            log_ratios = logprobs[-1] - ref_logprobs
            token_log_ratios.append(log_ratios.tolist())
            scores.append(score_of(reward, prompt + response)[-1].item())
        rewards = [-KL_COEF * x.item() if kl_in == "rewards" else 0.0 for x in log_ratios]
        rewards[-1] += scores[-1]
        token_rewards.append(rewards)
        totals.append(sum(rewards))
        penalties.append((logprobs[-1] - ref_logprobs) ** 2 / 2)
    assert result.scores.sum.tolist() == pytest.approx(scores, abs=1e-4)
    if generations > 1:
        assert result.metrics["objective/uniform_groups"] == 0

    losses = []
    for index, (number, prompt, response) in enumerate(responses):
        if algorithm == "ppo":
            with torch.no_grad():
                values = score_of(critic, prompt + response)[len(prompt) - 1 : -1].tolist()
            advantages = gae(token_rewards[index], values)
        elif algorithm == "distill":
            advantages = [-log_ratio for log_ratio in token_log_ratios[index]]
        else:
            group = [totals[other] for other, row in enumerate(responses) if row[0] == number]
            advantages = [advantage(algorithm, totals[index], group)] * len(response)
        for t, value in enumerate(advantages):
            ratio = torch.exp(logprobs[index][t] - logprobs[index][t].detach())
            losses.append(-value * ratio)
            if kl_in == "loss":
                losses[-1] = losses[-1] + KL_COEF * penalties[index][t]
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = torch.cat([weight.grad.flatten() for weight in actor.parameters()]).norm()
    assert result.metrics["policy/loss"] == pytest.approx(loss.item(), abs=1e-4, rel=1e-3)
    assert result.metrics["policy/grad_norm"] == pytest.approx(norm.item(), rel=2e-3)
    # The penalty is part of what is compared.
    kl = "kl_to_teacher" if algorithm == "distill" else "kl"
    assert result.metrics[f"objective/{kl}"] > 0.01


def test_a_single_update_needs_no_pass_before_it(train, monkeypatch):
    settings = {**SETTINGS, "algorithm": "grpo", "num_generations": 3, "global_batch_size": 48}
    settings |= {"kl_in": "loss", "kl_estimator": "k2"}
    passes, name = [], "logprobs_and_entropies"
    evaluate = Rollouts.logprobs_and_entropies
    monkeypatch.setattr(Rollouts, name, lambda *of: passes.append(1) or evaluate(*of))
    job = train(**settings)
    single = job.metrics
    assert not passes and job.record["evaluated_in_update"]
    monkeypatch.setattr(train_rlhf, "evaluated_in_update", lambda *_: False)
    plain = train(**settings).metrics
    assert len(passes) == 2
    for found, expected in zip(single, plain, strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


def logprobs_of(model, prompt, response):
    """Return the log-probability of each token of a response."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    table = functional.log_softmax(logits / TEMPERATURE, dim=-1)
    return table[range(len(response)), response]


def score_of(model, ids):
    """Return the output of a score head at each token."""
    hidden = model.base_model(torch.tensor([ids])).last_hidden_state[0]
    return model.score(hidden)[:, 0]


def advantage(algorithm, total, group):
    """Return the advantage of a response, given the rewards of all responses to its prompt."""
    mean = sum(group) / len(group)
    if algorithm == "rloo":
        return total - (sum(group) - total) / (len(group) - 1)
    variance = sum((other - mean) ** 2 for other in group) / (len(group) - 1)
    return (total - mean) / (variance**0.5 + 1e-4)


def gae(rewards, values):
    """Return the advantage of each token by the recurrence of Schulman et al. 2016."""
    advantages, following = [], 0.0
    for t in reversed(range(len(rewards))):
        next_value = values[t + 1] if t + 1 < len(rewards) else 0.0
        following = rewards[t] + GAMMA * next_value - values[t] + GAMMA * GAE_LAMBDA * following
        advantages.insert(0, following)
    return advantages
