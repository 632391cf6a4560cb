"""Scores of responses: sources, normalization, clipping, penalties, errors; the KL controller."""

import contextlib
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from snakechat.algorithms import reward_sum
from snakechat.algorithms.kl_coefficient import KLController
from snakechat.algorithms.response_scoring import ScoreNormalization
from snakechat.algorithms.reward_models import Reader, RewardModel
from snakechat.algorithms.reward_sum import RewardSum
from snakechat.workflow.errors import InputError

# Rows of the prompts; two responses to each.
ROWS = [70, 50]
ROLLOUTS = SimpleNamespace(
    device=torch.device("cpu"),
    ended=torch.ones(4, dtype=torch.bool),
    micro_batch_tokens=100,
    examples="token ids",
    decode=lambda: (["p", "q", "p", "q"], ["a", "bb", "ccc", "dddd"]),
    response_texts=lambda: ["a", "bb", "ccc", "dddd"],
)


class Texts:
    """The turns of the prompts in ROWS."""

    def turns(self, rows):
        return [[("user", {70: "7", 50: "5"}[row])] for row in rows]

    def columns(self, rows):
        return {"row": list(rows)}


def length(prompts, responses, columns):
    """A reward function: the number of characters, plus 10 for responses to q."""
    assert columns["row"] == [*ROWS, *ROWS]
    assert [turns[0]["content"] for turns in columns["messages"]] == ["7", "5", "7", "5"]
    return [len(a) + 10 * (p == "q") for p, a in zip(prompts, responses, strict=True)]


def reward_model(name, weight=1.0, encoder=None):
    module = SimpleNamespace(on_device=lambda: contextlib.nullcontext("on its device"))
    return RewardModel(name, module, weight, Reader(None, encoder, True))


# Sources.


def test_scores_of_each_source_have_no_weights(monkeypatch):
    def scores(scorer, examples, micro_batch_tokens):
        assert (scorer, micro_batch_tokens) == ("on its device", 100)
        if examples == "token ids":
            return np.array([[1.0, 2.0], [3.0, 4.0]])
        return np.array([[float(f"{prompt[0][1]}.{len(text)}") for prompt, text in examples]])

    def examples_of(scorer, encoder, prompts, responses):
        return list(zip(prompts, responses, strict=True))

    monkeypatch.setattr(reward_sum, "response_scores", scores)
    monkeypatch.setattr(reward_sum, "conversation_examples", examples_of)
    # The second reward model has another tokenizer, and reads the text.
    rewards = [reward_model("reward/0", 0.5), reward_model("models/1", 10.0, "encoder")]
    scorer = RewardSum(rewards, {"length": (-2.0, length)}, Texts())
    scores = scorer.score(ROLLOUTS, 1, ROWS)
    expected = {"reward/0": [1, 2, 3, 4], "models/1": [7.1, 5.2, 7.3, 5.4]}
    expected["length"] = [1, 12, 3, 14]
    assert scores.by_source.keys() == expected.keys()
    for name, values in scores.by_source.items():
        assert values.tolist() == pytest.approx(expected[name])
    assert scores.sum.tolist() == pytest.approx([69.5, 29, 68.5, 28])


@pytest.mark.parametrize(("rank", "num_calls"), [(0, 1), (1, 0)])
def test_only_rank_0_calls_functions(rank, num_calls, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    sums = torch.tensor([[5.0, 6.0, 7.0, 8.0]])
    calls, reduced = [], []
    monkeypatch.setattr(
        reward_sum, "all_reduce_sum", lambda scores: reduced.append(scores.tolist()) or sums
    )

    def function(prompts, responses, columns):
        calls.append(responses)
        return [1.0, 2.0, 3.0, 4.0]

    scorer = RewardSum([], {"mine": (1.0, function)}, Texts())
    assert scorer.score(ROLLOUTS, 1, ROWS).sum.tolist() == sums[0].tolist()
    assert len(calls) == num_calls
    assert reduced == [[[1.0, 2.0, 3.0, 4.0] if num_calls else [0.0] * 4]]


@pytest.mark.parametrize(("index", "row", "value"), [(0, 70, math.nan), (3, 50, -math.inf)])
def test_a_non_finite_score_is_an_error_that_names_its_row(index, row, value, monkeypatch):
    scores = np.ones((2, 2))
    scores.flat[index] = value
    monkeypatch.setattr(reward_sum, "response_scores", lambda *_: scores)
    with pytest.raises(InputError, match=f"step 12: the score of a response to row {row} is"):
        RewardSum([reward_model("reward/0")], {}, Texts()).score(ROLLOUTS, 12, ROWS)


# Normalization.


def make(mode="none", critic_weight=1.0, **changes):
    settings = {"standardize_scores": mode, "score_clip": None, "missing_eos_penalty": 0.0}
    settings |= {"overlong_buffer": 0, "max_response_length": 10}
    return ScoreNormalization(SimpleNamespace(**settings | changes), critic_weight)


def normalize(normalization, *scores, function="normalize"):
    """Return normalized scores of four responses, the last of which has no eos."""
    ended = torch.tensor([True, True, True, False])
    lengths = torch.tensor([2, 8, 9, 10])
    return getattr(normalization, function)(torch.tensor(scores), ended, lengths).tolist()


@pytest.mark.parametrize("mode", ["first", "running"])
def test_equal_scores_are_kept_until_two_scores_differ(mode):
    value, normalization = 0.1, make(mode)
    assert normalize(normalization, *[value] * 4) == pytest.approx([value] * 4)
    found = normalize(normalization, 1.0, 5.0, 1.0, 5.0)
    # With the earlier ones.
    sample = torch.tensor([value] * 4 + [1.0, 5.0, 1.0, 5.0], dtype=torch.float64)
    expected = ((sample - sample.mean()) / sample.std(correction=0))[4:].tolist()
    assert found == pytest.approx(expected)


def test_mode_first_keeps_the_moments_of_the_first_step():
    normalization = make("first")
    # Mean 3, deviation 2.
    assert normalize(normalization, 1.0, 5.0, 1.0, 5.0) == [-1, 1, -1, 1]
    assert normalize(normalization, 3.0, 7.0, 11.0, -1.0) == [0, 2, 4, -2]
    assert normalization.critic_normalizer(torch.tensor([3.0, 6.0])).tolist() == [0, 1.5]


def test_mode_running_uses_the_moments_of_all_scores_so_far():
    normalization = make("running")
    # Mean 2, deviation 1.
    assert normalize(normalization, 1.0, 3.0, 1.0, 3.0) == [-1, 1, -1, 1]
    # With 5, 7, 5 and 7: mean 4, deviation sqrt(5).
    found = normalize(normalization, 5.0, 7.0, 5.0, 7.0)
    assert found == pytest.approx([1 / math.sqrt(5), 3 / math.sqrt(5)] * 2)
    # The critic was trained on those of the first step.
    assert normalization.critic_normalizer(torch.tensor([2.0, 5.0])).tolist() == [0, 3]
    # An evaluation leaves the normalization as it is.
    before = normalization.state_dict()
    assert normalize(normalization, *[4.0] * 4, function="normalized") == [0] * 4
    assert normalization.state_dict() == before


def test_the_penalty_is_subtracted_after_clipping_normalized_scores():
    normalization = make("first", score_clip=0.75, missing_eos_penalty=2.0)
    # Normalized: -1, 1, -1 and 1. The last response has no eos.
    assert normalize(normalization, 1.0, 5.0, 1.0, 5.0) == [-0.75, 0.75, -0.75, 0.75 - 2.0]
    # It does not count in the moments.
    assert normalization.normalizer.moments == (4, 3.0, 16.0)


def test_the_penalty_of_long_responses_rises_over_the_buffer():
    normalization = make(missing_eos_penalty=3.0, overlong_buffer=3)
    # Lengths 2, 8 and 9 of 10; the last response has no eos.
    assert normalize(normalization, 0.0, 0.0, 0.0, 1.0) == pytest.approx([0, -1, -2, 1 - 3])


def test_a_critic_starts_on_the_scale_of_its_reward_models_weight():
    normalization = make("first", critic_weight=0.5)
    # Sums: mean 7.5, deviation 5.
    normalize(normalization, 2.5, 12.5, 2.5, 12.5)
    assert normalization.critic_normalizer(torch.tensor([15.0])).tolist() == [0]
    unscaled = make("first", critic_weight=None)
    normalize(unscaled, 2.5, 12.5, 2.5, 12.5)
    assert unscaled.critic_normalizer(torch.tensor([15.0])).tolist() == [15]


def test_a_restored_normalization_and_kl_controller_continue_exactly():
    random = torch.Generator().manual_seed(1)
    steps = [(3 * torch.randn(4, generator=random) + 0.1).tolist() for _ in range(4)]
    whole, stopped, resumed = (make("running") for _ in range(3))
    expected = [normalize(whole, *scores) for scores in steps]
    for scores in steps[:2]:
        normalize(stopped, *scores)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert [normalize(resumed, *scores) for scores in steps[2:]] == expected[2:]
    values = torch.randn(8, generator=random)
    assert torch.equal(resumed.critic_normalizer(values), whole.critic_normalizer(values))
    settings = SimpleNamespace(kl_coef=0.1, kl_target=6.0, kl_horizon=1000)
    adaptive, restored = KLController(settings), KLController(settings)
    adaptive.update(7.3, 96)
    restored.load_state_dict(json.loads(json.dumps(adaptive.state_dict())))
    for one in (adaptive, restored):
        one.update(5.1, 96)
    assert restored.coef == adaptive.coef != 0.1
