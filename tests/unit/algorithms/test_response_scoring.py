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
from snakechat.algorithms.response_scoring import ResponseScorer
from snakechat.algorithms.reward_models import Reader, RewardModel
from snakechat.workflow.errors import InputError

CPU = torch.device("cpu")
# Rows of the prompts; two responses to each.
ROWS = [70, 50]


class Rollouts:
    """Two responses to two prompts, with the reward model's scores. The last one has no eos."""

    device = CPU
    ended = torch.tensor([True, True, True, False])
    lengths = torch.tensor([2, 8, 9, 10])

    def __init__(self, *scores):
        self.reward_scores = torch.tensor(scores)

    def scores(self, scorer):
        assert scorer == "reward model on its device"
        return self.reward_scores

    def decode(self):
        return ["p", "q", "p", "q"], ["a", "bb", "ccc", "dddd"]


class Reward:
    """A frozen model."""

    @contextlib.contextmanager
    def on_device(self):
        yield "reward model on its device"


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


def make(reward=True, functions=None, weights=None, **changes):
    weights = weights or ([1.0] if reward else [])
    settings = {"standardize_scores": "none", "score_clip": 1e9, "missing_eos_penalty": 0.0}
    settings |= {"overlong_buffer": 0, "max_response_length": 10}
    settings |= changes
    rewards = [
        RewardModel(f"reward/{number}", Reward(), weight, Reader(None, None, True))
        for number, weight in enumerate(weights)
    ]
    return ResponseScorer(
        SimpleNamespace(**settings),
        rewards,
        functions or {},
        Texts(),
        critic_origin=rewards[0] if rewards else None,
    )


def run_step(scorer, *scores, step=1):
    """Scores and normalized scores."""
    rollouts = Rollouts(*scores)
    raw = scorer.score(rollouts, step, ROWS).sum
    return raw.tolist(), scorer.normalize(raw, rollouts.ended, rollouts.lengths).tolist()


# Sources.


def test_a_reward_model_with_another_tokenizer_reads_the_text_of_prompts_and_responses(monkeypatch):
    def score(scorer, encoder, prompts, responses, micro_batch_tokens):
        assert (scorer, encoder) == ("reward model on its device", "encoder")
        texts = [text for [(_, text)] in prompts]
        return np.array([float(f"{p}.{len(r)}") for p, r in zip(texts, responses, strict=True)])

    monkeypatch.setattr(reward_sum, "conversation_scores", score)
    reward = RewardModel("models/other", Reward(), 10.0, Reader(None, "encoder", False))
    settings = SimpleNamespace()
    scorer = ResponseScorer(settings, [reward], {}, prompt_texts=Texts())
    rollouts = Rollouts()
    rollouts.response_texts = lambda: ["a", "bb", "ccc", "dddd"]
    rollouts.micro_batch_tokens = 100
    assert scorer.score(rollouts, 1, ROWS).sum.tolist() == pytest.approx([71, 52, 73, 54])


def test_scores_of_each_source_have_no_weights():
    functions = {"length": (-2.0, length)}
    scorer = make(weights=[0.5, 3.0], functions=functions)
    scores = scorer.score(Rollouts(1.0, 2.0, 3.0, 4.0), 1, ROWS)
    assert {name: values.tolist() for name, values in scores.by_source.items()} == {
        "reward/0": [1, 2, 3, 4],
        "reward/1": [1, 2, 3, 4],
        "length": [1, 12, 3, 14],
    }
    assert scores.sum.tolist() == [1.5, -17, 4.5, -14]


def test_an_evaluation_leaves_the_normalization_as_it_is():
    scorer = make(standardize_scores="running", missing_eos_penalty=1.0)
    run_step(scorer, 0.0, 0.0, 2.0, 2.0)
    before = scorer.state_dict()
    ended, lengths = torch.tensor([True, True, False, True]), torch.ones(4)
    scores = scorer.normalized(torch.tensor([1.0, 3.0, 3.0, 5.0]), ended, lengths)
    # Mean 1 and deviation 1.
    assert scores.tolist() == [0, 2, 1, 4]
    assert scorer.state_dict() == before


@pytest.mark.parametrize(("rank", "num_calls"), [(0, 1), (1, 0)])
def test_only_rank_0_calls_functions(rank, num_calls, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    sums = torch.tensor([[5.0, 6.0, 7.0, 8.0]])
    calls, reduced = [], []
    monkeypatch.setattr(
        "snakechat.algorithms.reward_sum.all_reduce_sum",
        lambda scores: reduced.append(scores.tolist()) or sums,
    )

    def function(prompts, responses, columns):
        calls.append(responses)
        return [1.0, 2.0, 3.0, 4.0]

    assert run_step(make(reward=False, functions={"mine": (1.0, function)}))[0] == sums[0].tolist()
    assert len(calls) == num_calls
    assert reduced == [[[1.0, 2.0, 3.0, 4.0] if num_calls else [0.0] * 4]]


# Invalid scores.


@pytest.mark.parametrize(("index", "row", "value"), [(0, 70, math.nan), (3, 50, -math.inf)])
def test_a_non_finite_score_is_an_error_that_names_its_row(index, row, value):
    scores = [1.0, 2.0, 3.0, 4.0]
    scores[index] = value
    with pytest.raises(InputError, match=f"step 12: the score of a response to row {row} is"):
        run_step(make(), *scores, step=12)


@pytest.mark.parametrize("standardize", ["first", "running"])
def test_equal_scores_are_kept_until_two_scores_differ(standardize):
    value, scorer = 0.1, make(standardize_scores=standardize)
    assert run_step(scorer, *[value] * 4)[1] == pytest.approx([value] * 4)
    found = run_step(scorer, 1.0, 5.0, 1.0, 5.0, step=2)[1]
    # With the earlier ones.
    sample = torch.tensor([value] * 4 + [1.0, 5.0, 1.0, 5.0], dtype=torch.float64)
    expected = ((sample - sample.mean()) / sample.std(correction=0))[4:].tolist()
    assert found == pytest.approx(expected)


# Normalization.


def test_mode_first_keeps_the_moments_of_the_first_step():
    scorer = make(standardize_scores="first")
    # Mean 3, deviation 2.
    assert run_step(scorer, 1.0, 5.0, 1.0, 5.0)[1] == [-1, 1, -1, 1]
    assert run_step(scorer, 3.0, 7.0, 11.0, -1.0, step=2)[1] == [0, 2, 4, -2]
    assert scorer.critic_normalizer(torch.tensor([3.0, 6.0])).tolist() == [0, 1.5]


def test_mode_running_uses_the_moments_of_all_scores_so_far():
    scorer = make(standardize_scores="running")
    # Mean 2, deviation 1.
    assert run_step(scorer, 1.0, 3.0, 1.0, 3.0)[1] == [-1, 1, -1, 1]
    # With 5, 7, 5 and 7: mean 4, deviation sqrt(5).
    found = run_step(scorer, 5.0, 7.0, 5.0, 7.0, step=2)[1]
    assert found == pytest.approx([1 / math.sqrt(5), 3 / math.sqrt(5)] * 2)
    # The critic was trained on those of the first step.
    assert scorer.critic_normalizer(torch.tensor([2.0, 5.0])).tolist() == [0, 3]


def test_the_penalty_is_subtracted_after_clipping_normalized_scores():
    scorer = make(standardize_scores="first", score_clip=0.75, missing_eos_penalty=2.0)
    # Normalized: -1, 1, -1 and 1. The last response has no eos.
    assert run_step(scorer, 1.0, 5.0, 1.0, 5.0)[1] == [-0.75, 0.75, -0.75, 0.75 - 2.0]
    # It does not count in the moments.
    assert scorer.normalizer.moments == (4, 3.0, 16.0)


def test_the_penalty_of_long_responses_rises_over_the_buffer():
    scorer = make(missing_eos_penalty=3.0, overlong_buffer=3)
    # Lengths 2, 8 and 9 of 10; the last response has no eos.
    found = run_step(scorer, 0.0, 0.0, 0.0, 1.0)[1]
    assert found == pytest.approx([0, -1, -2, 1 - 3])


@pytest.mark.parametrize("standardize", ["first", "running"])
def test_a_restored_scorer_continues_exactly(standardize):
    random = torch.Generator().manual_seed(1)
    steps = [(3 * torch.randn(4, generator=random) + 0.1).tolist() for _ in range(4)]
    whole, stopped, resumed = (make(standardize_scores=standardize) for _ in range(3))
    expected = [run_step(whole, *scores, step=step) for step, scores in enumerate(steps, start=1)]
    for step in (1, 2):
        run_step(stopped, *steps[step - 1], step=step)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert [run_step(resumed, *steps[step - 1], step=step) for step in (3, 4)] == expected[2:]
    values = torch.randn(8, generator=random)
    assert torch.equal(resumed.critic_normalizer(values), whole.critic_normalizer(values))


# KL controller.


def test_a_restored_kl_controller_continues_exactly():
    settings = SimpleNamespace(kl_coef=0.1, kl_target=6.0, kl_horizon=1000)
    adaptive, resumed = KLController(settings), KLController(settings)
    adaptive.update(7.3, 96)
    resumed.load_state_dict(json.loads(json.dumps(adaptive.state_dict())))
    for one in (adaptive, resumed):
        one.update(5.1, 96)
    assert resumed.coef == adaptive.coef != 0.1


def test_a_critic_starts_on_the_scale_of_its_reward_models_weight():
    scorer = make(weights=[0.5, 2.0], standardize_scores="first")
    # Sums of 2.5, 12.5, 2.5 and 12.5: mean 7.5, deviation 5.
    run_step(scorer, 1.0, 5.0, 1.0, 5.0)
    assert scorer.critic_normalizer(torch.tensor([15.0])).tolist() == [0]
