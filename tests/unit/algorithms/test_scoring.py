"""What responses are worth: units, clipping, penalties, functions, and scores that are none."""

import contextlib
import json
import math
from types import SimpleNamespace

import pytest
import torch

from snakechat.algorithms.kl_controller import KLController
from snakechat.algorithms.reward_functions import RewardFunctions
from snakechat.algorithms.scoring import Scoring, Standardizer
from snakechat.workflow.errors import InputError

CPU = torch.device("cpu")
# Prompts of the steps, by row; two responses to each.
ROWS = [70, 50]


class Rollouts:
    """Two responses to two prompts, with the reward model's scores of them. The last has no end."""

    device = CPU
    ended = torch.tensor([True, True, True, False])

    def __init__(self, *scores):
        self.told = torch.tensor(scores)

    def scores(self, scorer):
        assert scorer == "scorer at work"
        return self.told

    def texts(self):
        return ["p", "q", "p", "q"], ["a", "bb", "ccc", "dddd"]


class Reward:
    """A reward model that must be put to work to be asked."""

    @contextlib.contextmanager
    def at_work(self):
        yield "scorer at work"


def length(prompts, responses):
    """A reward function: characters, and 10 more for a response to q."""
    return [len(a) + 10 * (p == "q") for p, a in zip(prompts, responses, strict=True)]


def make(reward=True, functions=None, **changes):
    settings = {"standardize_scores": "none", "score_clip": 1e9, "missing_eos_penalty": 0.0}
    settings |= {"reward_functions": {"length": 1.0} if functions else {}, **changes}
    return Scoring(SimpleNamespace(**settings), Reward() if reward else None, functions)


def run_step(scoring, *scores, step=1):
    """Scores, as they are and to learn from."""
    rollouts = Rollouts(*scores)
    raw = scoring.scores(rollouts, step, ROWS)
    return raw.tolist(), scoring.final(raw, rollouts.ended).tolist()


# Where scores are from.


def test_the_reward_models_scores_are_the_scores():
    assert run_step(make(), 1.0, 2.0, 3.0, 4.0)[0] == [1, 2, 3, 4]


def test_functions_are_asked_for_texts_and_added():
    assert run_step(make(functions=length), 100.0, 200.0, 300.0, 400.0)[0] == [101, 212, 303, 414]
    assert run_step(make(reward=False, functions=length))[0] == [1, 12, 3, 14]


def test_without_functions_no_text_is_made():
    rollouts = Rollouts(1.0, 2.0, 3.0, 4.0)
    rollouts.texts = lambda: pytest.fail("texts were made")
    make().scores(rollouts, 1, ROWS)


def test_functions_of_the_user_are_weighted(tmp_path, monkeypatch):
    monkeypatch.setattr("snakechat.algorithms.reward_functions.FOLDER", tmp_path)
    (tmp_path / "long.py").write_text(
        "def score(prompts, responses):\n    return [len(response) for response in responses]\n"
    )
    (tmp_path / "asks.py").write_text(
        "def score(prompts, responses):\n    return [prompt == 'q' for prompt in prompts]\n"
    )
    weights = {"long": 0.5, "asks": -2}
    scoring = make(functions=RewardFunctions(weights), reward_functions=weights)
    assert run_step(scoring, 100.0, 200.0, 300.0, 400.0)[0] == [100.5, 199, 301.5, 400]


@pytest.mark.parametrize(("rank", "asked"), [(0, 1), (1, 0)])
def test_the_first_process_alone_asks_functions(rank, asked, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    told = torch.tensor([5.0, 6.0, 7.0, 8.0])
    calls, shares = [], []
    monkeypatch.setattr(
        "snakechat.algorithms.scoring.total", lambda share: shares.append(share.tolist()) or told
    )

    def function(prompts, responses):
        calls.append(responses)
        return [1.0, 2.0, 3.0, 4.0]

    assert run_step(make(reward=False, functions=function))[0] == told.tolist()
    assert len(calls) == asked
    assert shares == [[1.0, 2.0, 3.0, 4.0] if asked else [0.0] * 4]


# Scores that are none.


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("place", "row"), [(0, 70), (1, 50), (2, 70), (3, 50)])
def test_a_score_that_is_no_number_is_refused_with_its_row(place, row, wrong):
    scores = [1.0, 2.0, 3.0, 4.0]
    scores[place] = wrong
    with pytest.raises(InputError) as refused:
        run_step(make(), *scores, step=12)
    assert str(refused.value) == (
        f"step 12: the response to row {row} has the score {wrong}: scores must be numbers: look at"
        " the reward model"
    )


@pytest.mark.parametrize("standardize", ["none", "first", "running"])
@pytest.mark.parametrize("value", [2.5, 0.0, 0.1])
def test_scores_that_are_all_the_same_at_the_start_are_refused(value, standardize):
    with pytest.raises(InputError) as refused:
        run_step(make(standardize_scores=standardize), *[value] * 4)
    assert str(refused.value) == (
        f"step 1: every response has the same score, {value:g}: there is nothing to learn from"
    )


@pytest.mark.parametrize("standardize", ["none", "first", "running"])
def test_later_they_may_be_all_the_same(standardize):
    # As where all responses have become right.
    scoring = make(standardize_scores=standardize)
    run_step(scoring, 0.0, 0.0, 1.0, 1.0)
    assert run_step(scoring, 1.0, 1.0, 1.0, 1.0, step=2)[0] == [1.0] * 4
    resumed = make(standardize_scores=standardize)
    resumed.load_state_dict(json.loads(json.dumps(scoring.state_dict())))
    assert run_step(resumed, 1.0, 1.0, 1.0, 1.0, step=3)[0] == [1.0] * 4


# Units.


def test_scores_may_be_learnt_from_as_they_are():
    scoring = make()
    for step in (1, 2):
        assert run_step(scoring, 1.0, 5.0, -7.0, 9.0, step=step)[1] == [1, 5, -7, 9]
    assert scoring.critic_units(torch.tensor([3.5])).tolist() == [3.5]


def test_the_units_of_the_first_step_stay():
    scoring = make(standardize_scores="first")
    # Mean 3, deviation 2.
    assert run_step(scoring, 1.0, 5.0, 1.0, 5.0)[1] == [-1, 1, -1, 1]
    assert run_step(scoring, 3.0, 7.0, 11.0, -1.0, step=2)[1] == [0, 2, 4, -2]
    assert scoring.critic_units(torch.tensor([3.0, 6.0])).tolist() == [0, 1.5]


def test_running_units_are_those_of_all_scores_so_far():
    scoring = make(standardize_scores="running")
    # Mean 2, deviation 1.
    assert run_step(scoring, 1.0, 3.0, 1.0, 3.0)[1] == [-1, 1, -1, 1]
    # With 5, 7, 5 and 7: mean 4, deviation sqrt(5).
    found = run_step(scoring, 5.0, 7.0, 5.0, 7.0, step=2)[1]
    assert found == pytest.approx([1 / math.sqrt(5), 3 / math.sqrt(5)] * 2)
    # The critic learnt to speak in the first ones.
    assert scoring.critic_units(torch.tensor([2.0, 5.0])).tolist() == [0, 3]


@pytest.mark.parametrize("standardize", ["none", "first", "running"])
def test_a_critic_that_does_not_start_as_a_reward_model_has_no_units(standardize):
    scoring = make(reward=False, functions=length, standardize_scores=standardize)
    run_step(scoring)
    assert scoring.critic_units(torch.tensor([3.5])).tolist() == [3.5]


def test_before_the_first_step_units_are_raw():
    scores = torch.tensor([-2.5, 0.0, 7.0])
    assert torch.equal(Standardizer()(scores), scores)


def test_scores_are_clipped_in_their_units_and_the_penalty_comes_off_behind():
    scoring = make(standardize_scores="first", score_clip=0.75, missing_eos_penalty=2.0)
    # -1, 1, -1 and 1 deviations, and the last response has no end.
    assert run_step(scoring, 1.0, 5.0, 1.0, 5.0)[1] == [-0.75, 0.75, -0.75, 0.75 - 2.0]


def test_the_penalty_is_no_part_of_the_units():
    scoring = make(standardize_scores="running", missing_eos_penalty=50.0)
    assert run_step(scoring, 1.0, 5.0, 1.0, 5.0)[1] == [-1, 1, -1, -49]
    assert scoring.units.moments == (4, 3.0, 16.0)


def test_scores_that_are_told_are_raw():
    scoring = make(standardize_scores="first", score_clip=0.1, missing_eos_penalty=1.0)
    assert run_step(scoring, 1.0, 5.0, 1.0, 5.0)[0] == [1, 5, 1, 5]


@pytest.mark.parametrize("standardize", ["none", "first", "running"])
def test_scoring_goes_on_from_its_state_to_the_last_digit(standardize):
    random = torch.Generator().manual_seed(1)
    steps = [(3 * torch.randn(4, generator=random) + 0.1).tolist() for _ in range(4)]
    whole, stopped, resumed = (make(standardize_scores=standardize) for _ in range(3))
    expected = [run_step(whole, *scores, step=step) for step, scores in enumerate(steps, start=1)]
    for step in (1, 2):
        run_step(stopped, *steps[step - 1], step=step)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert [run_step(resumed, *steps[step - 1], step=step) for step in (3, 4)] == expected[2:]
    values = torch.randn(8, generator=random)
    assert torch.equal(resumed.critic_units(values), whole.critic_units(values))


# The weight of the KL.


def controller(target):
    return KLController(SimpleNamespace(kl_coef=0.1, kl_target=target, kl_horizon=1000))


def test_without_a_target_the_weight_of_the_kl_stays():
    fixed = controller(None)
    for kl in (0.0, 5.0, 1e6):
        fixed.update(kl, 100)
    assert fixed.coef == 0.1


@pytest.mark.parametrize(
    ("kl", "coef"),
    [
        (6.0, 0.1),
        # 10 % too much of 100 responses: .1 * 100 / 1000.
        (6.6, 0.1 * 1.01),
        (5.4, 0.1 * 0.99),
        # No more than a fifth counts.
        (60.0, 0.1 * 1.02),
        (0.0, 0.1 * 0.98),
    ],
)
def test_the_weight_of_the_kl_is_steered_to_the_target(kl, coef):
    steered = controller(6.0)
    steered.update(kl, 100)
    assert steered.coef == pytest.approx(coef, rel=1e-12)


def test_a_weight_goes_on_from_its_state():
    steered, resumed = controller(6.0), controller(6.0)
    steered.update(7.3, 96)
    resumed.load_state_dict(json.loads(json.dumps(steered.state_dict())))
    for one in (steered, resumed):
        one.update(5.1, 96)
    assert resumed.coef == steered.coef != 0.1
