"""Gradients of a minibatch against plain autograd, and the metrics of several updates."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from snakechat.algorithms.experience import Experience, TokenEvaluation
from snakechat.algorithms.policy_updates import (
    informative_rows,
    mean_metrics,
    policy_gradients,
    value_gradients,
)
from snakechat.algorithms.rollouts import Rollouts
from snakechat.modeling import models
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy, Scorer
from snakechat.modeling.loading import load_scorer
from snakechat.modeling.models import Acceleration

CPU = torch.device("cpu")
PROMPTS = [[11, 12, 13], [14], [15, 16]]
# Two responses to each prompt.
RESPONSES = [[[21, 2], [22, 23, 24], [25, 2]], [[26, 27], [28, 2], [29, 30, 31]]]
ROWS = np.array([2, 0])
# Table rows of the responses to these prompts.
INDICES = [2, 0, 5, 3]
TEXT = Examples([[0, 9], [0, 8]], [[7, 6], [5]])


class Engine:
    """An engine without an optimizer."""

    def __init__(self, module):
        self.module, self.last = module, []

    def __call__(self, *arguments, **options):
        return self.module(*arguments, **options)

    def backward(self, loss, last):
        loss.backward()
        self.last.append(last)


def make_settings(**changes):
    settings = {"temperature": 1.0, "clip_range": 0.2, "value_clip_range": 0.2, "ptx_coef": 2.0}
    settings |= {"clip_range_high": None, "importance_sampling_level": "token"}
    settings |= {"loss_aggregation": "token_mean", "max_response_length": 5, "algorithm": "grpo"}
    return SimpleNamespace(
        **settings | {"kl_in": "loss", "kl_estimator": "k3", "kl_coef": 0.7} | changes
    )


@pytest.fixture(autouse=True)
def one_row_per_micro_batch(monkeypatch):
    monkeypatch.setattr(models, "_acceleration", Acceleration(micro_batch_tokens=1))


def make_rollouts():
    return Rollouts(PROMPTS, RESPONSES, None, [2], 1.0, CPU)


def random_experience(rollouts, logprobs, seed=1):
    """Advantages at random; old and reference log-probabilities close to the current ones."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale=1.0):
        return scale * torch.randn(6, 3, generator=generator) * rollouts.response_mask

    old = logprobs.detach() + noise(0.3)
    reference = logprobs.detach() + noise(0.5)
    return Experience(
        TokenEvaluation(old, torch.zeros(6, 3), reference, values=noise(0.1)),
        rewards=torch.zeros(6, 3),
        advantages=noise(),
        importance_weights=noise().exp(),
        returns=noise(),
        is_uniform=torch.tensor([False, True, False]),
        kl_coef=0.7,
        in_update=False,
    )


def gradients_of(module):
    gradients = torch.cat([weight.grad.flatten() for weight in module.parameters()])
    module.zero_grad()
    return gradients


def table_of_logprobs(policy):
    """Log-probabilities [6, 3] by one forward pass for each response, with gradients."""
    table = torch.zeros(6, 3)
    for number, responses in enumerate(RESPONSES):
        for row, response in enumerate(responses):
            ids = torch.tensor([PROMPTS[row] + response])
            logits = policy.model(input_ids=ids).logits[0, len(PROMPTS[row]) - 1 : -1]
            logprobs = logits.log_softmax(dim=1)[range(len(response)), response]
            table[3 * number + row, : len(response)] = logprobs
    return table


def k3(new, reference):
    return (reference - new).exp() - 1 - (reference - new)


def naive_loss(settings, table, experience):
    """The loss of the responses to the prompts ROWS, response by response."""
    losses, num_tokens = [], 0
    for index in INDICES:
        length = len(RESPONSES[index // 3][index % 3])
        tables = table, *experience.evaluation[:3], *experience[2:4]
        new, old, _, reference, advantages, weights = (each[index, :length] for each in tables)
        log_ratio = new - old
        if settings.importance_sampling_level == "sequence":
            log_ratio = log_ratio.sum() / length
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - settings.clip_range, 1 + settings.clip_range_high)
        loss = -weights * torch.minimum(ratio * advantages, clipped * advantages)
        if settings.kl_in == "loss":
            k2 = 0.5 * (new - reference) ** 2
            penalty = k2 if settings.kl_estimator == "k2" else k3(new, reference)
            loss = loss + 0.7 * weights * (new - old).exp().detach() * penalty
        losses.append({"sequence_mean": loss.mean()}.get(settings.loss_aggregation, loss.sum()))
        num_tokens += length
    num_tokens = {"token_mean": num_tokens, "max_length": 4 * 5, "sequence_mean": 4}
    return sum(losses) / num_tokens[settings.loss_aggregation]


@pytest.mark.parametrize(
    ("aggregation", "level", "kl", "micro_batch_tokens"),
    [
        # All rows in one micro-batch, and one row in each.
        ("token_mean", "token", ("loss", "k3"), 1000),
        ("token_mean", "sequence", ("rewards", "k1"), 1),
        ("sequence_mean", "token", ("loss", "k2"), 1),
        ("max_length", "sequence", ("loss", "k2"), 1),
    ],
)
def test_policy_gradients_equal_those_of_a_loop(
    aggregation, level, kl, micro_batch_tokens, model, monkeypatch
):
    choices = Acceleration(micro_batch_tokens=micro_batch_tokens)
    monkeypatch.setattr(models, "_acceleration", choices)
    policy = Policy(model).eval()
    rollouts = make_rollouts()
    table = table_of_logprobs(policy)
    experience = random_experience(rollouts, table)
    changes = {"loss_aggregation": aggregation, "importance_sampling_level": level}
    changes |= {"clip_range": 0.02, "clip_range_high": 0.3, "kl_in": kl[0], "kl_estimator": kl[1]}
    settings = make_settings(**changes)
    loss = naive_loss(settings, table, experience)
    loss.backward()
    expected = gradients_of(policy)
    metrics = policy_gradients(Engine(policy), rollouts, ROWS, experience, settings)
    torch.testing.assert_close(gradients_of(policy), expected, rtol=1e-3, atol=1e-5)
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-4)
    # The logged KL is k3 with any estimator.
    mask = rollouts.response_mask[INDICES]
    new, old, reference = (each[INDICES][mask] for each in (table, *experience.evaluation[:3:2]))
    assert metrics["policy/kl"] == pytest.approx(k3(new, reference).mean().item(), rel=1e-4)
    if level == "token":
        ratio = (new - old).exp().mean().item()
        assert metrics["policy/ratio"] == pytest.approx(ratio, rel=1e-4)


def test_only_prompts_with_different_scores_are_informative():
    def of(*is_uniform):
        return SimpleNamespace(is_uniform=torch.tensor(is_uniform))

    rows = np.array([3, 0, 1])
    assert informative_rows(rows, of(False, True, False, False)).tolist() == [3, 0]
    # An update needs a gradient.
    assert informative_rows(rows, of(True, True, False, True)).tolist() == [3, 0, 1]


def test_text_adds_the_gradients_of_its_mean_loss_over_all_tokens(model):
    policy, rollouts = Policy(model).eval(), make_rollouts()
    experience = random_experience(rollouts, rollouts.logprobs(policy))
    engine = Engine(policy)
    policy_gradients(engine, rollouts, ROWS, experience, make_settings())
    without = gradients_of(policy)
    logprobs = []
    for ids in ([0, 9, 7, 6], [0, 8, 5]):
        logits = policy.model(input_ids=torch.tensor([ids])).logits[0, :-1]
        logprobs.append(logits.log_softmax(dim=1)[range(len(ids) - 1), ids[1:]])
    loss = -torch.cat(logprobs).mean()
    (2 * loss).backward()
    expected = without + gradients_of(policy)
    metrics = policy_gradients(engine, rollouts, ROWS, experience, make_settings(), TEXT)
    torch.testing.assert_close(gradients_of(policy), expected, rtol=1e-3, atol=1e-5)
    assert metrics["ptx/loss"] == pytest.approx(loss.item(), rel=1e-5)
    # The last backward pass of the update ends its gradients.
    assert engine.last == [False, True] + [False] * 3 + [True]


@pytest.mark.parametrize("clip_range", [0.2, 0.0])
def test_value_gradients_equal_those_of_the_plain_loss(clip_range, folder, tokenizer):
    critic = Scorer(load_scorer(folder, "fp32", tokenizer, new_head=True)).eval()
    rollouts = make_rollouts()
    experience = random_experience(rollouts, torch.zeros(6, 3))
    mask = rollouts.response_mask[INDICES]
    values = []
    for index in INDICES:
        prompt, response = PROMPTS[index % 3], RESPONSES[index // 3][index % 3]
        hidden = critic.model.base_model(input_ids=torch.tensor([prompt + response]))[0][0]
        values.append(critic.model.score(hidden)[len(prompt) - 1 : -1, 0])
    values, tables = torch.cat(values), (experience.evaluation.values, experience.returns)
    old_values, returns = (each[INDICES][mask] for each in tables)
    errors = (values - returns) ** 2
    is_clipped = (values - old_values).abs() > (clip_range or math.inf)
    if clip_range:
        clipped = torch.minimum(torch.maximum(values, old_values - 0.2), old_values + 0.2)
        errors = torch.maximum(errors, (clipped - returns) ** 2)
    loss = errors.mean() / 2
    loss.backward()
    expected = gradients_of(critic)
    settings = make_settings(value_clip_range=clip_range)
    metrics = value_gradients(Engine(critic), rollouts, ROWS, experience, settings)
    torch.testing.assert_close(gradients_of(critic), expected, rtol=1e-3, atol=1e-5)
    assert metrics["value/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics.get("value/clipfrac", 0) == pytest.approx(is_clipped.float().mean().item())
    assert is_clipped.any() == (clip_range > 0)


def test_mean_metrics_skip_updates_without_a_value():
    updates = [{"a": 1.0, "b": None}, {"a": 3.0, "b": None}, {"c": 5.0, "a": None}]
    assert mean_metrics(updates) == {"a": 2.0, "c": 5.0}
