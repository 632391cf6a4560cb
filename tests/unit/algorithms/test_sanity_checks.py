"""Checks of RLHF: models that do not fit together, degenerate responses, inconsistent updates."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from snakechat.algorithms import sanity_checks
from snakechat.algorithms.sanity_checks import (
    ResponseCheck,
    ScoreCheck,
    check_first_update,
    check_probes,
    count_shared_prompts,
)
from snakechat.data.ragged_arrays import Ragged, RaggedWriter
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import manifest_path
from support.specs import EMPTY_SPEC


def write(folder, **arrays):
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in arrays.items():
        with RaggedWriter(folder, name.replace("_", "."), 300) as writer:
            writer.write(rows)
    return folder


# Probes.


class LastToken(nn.Linear):
    """A scorer whose score is the id of the last token times its weight."""

    supports_packing = True
    model = SimpleNamespace(config=PreTrainedConfig())

    def __init__(self, weight=1.0):
        super().__init__(1, 1, bias=False)
        nn.init.constant_(self.weight, weight)

    def forward(self, batch, positions):
        return self.weight[0] * batch.inputs.input_ids.flatten()[positions]


@pytest.fixture
def probes(tmp_path):
    """Folders of a reward model with recorded scores of two pairs, and of tokens of three."""
    prompts = [[11, 12], [13], [14, 15]]
    chosen, rejected = [[21, 40], [60], [22, 23, 99]], [[80], [31, 20], [99]]
    tokens = write(tmp_path / "tokens", eval_prompt=prompts, eval_chosen=chosen)
    write(tokens, eval_rejected=rejected)
    folder = tmp_path / "reward"
    spec = {"rule": "train_reward", "name": "tiny", "path": str(folder), **EMPTY_SPEC}
    manifest = {"spec": spec, "inputs": {}, "lineage": {}}
    # Mean 50, standard deviation sqrt((100 + 100 + 900 + 900) / 4) = 22.4.
    manifest |= {"files": {}, "facts": {"probe_scores": [[40.0, 60.0], [80.0, 20.0]]}}
    manifest_path(folder).write_text(json.dumps(manifest))
    return folder, tokens


@pytest.mark.parametrize(("change", "accepted"), [(0.09, True), (0.11, False)])
def test_scores_may_change_by_a_tenth_of_their_standard_deviation(change, accepted, probes):
    # The largest score, 80, changes most.
    scorer = LastToken(1 + change * math.sqrt(500) / 80)
    if accepted:
        check_probes(scorer, *probes, 100)
        return
    with pytest.raises(InputError) as error:
        check_probes(scorer, *probes, 100)
    assert str(error.value) == (
        f"{probes[0]} does not reproduce its recorded probe scores: they differ by 2.46, expected"
        " less than 0.1 of their standard deviation 22.4: delete the folder and build again"
    )


@pytest.mark.parametrize("weight", [math.nan, 0.0])
def test_a_broken_model_is_an_error(weight, probes):
    with pytest.raises(InputError, match="does not reproduce its recorded probe scores"):
        check_probes(LastToken(weight), *probes, 100)


# Prompts.


@pytest.fixture
def inputs(tmp_path):
    """Input folders of a job by name: some of its four prompts are in other phases too."""
    own = write(tmp_path / "rlhf", train_prompt=[[11], [11, 12], [13], [14]])
    sft = write(tmp_path / "sft", train_prompt=[[11, 12], [12], [14], [14]])
    reward = write(tmp_path / "reward", train_prompt=[[12, 11], [1, 1], [13, 13]])
    # Only tokens.PHASE are other phases.
    return {"tokens": own, "actor": own, "ptx": own, "tokens.sft": sft, "tokens.reward": reward}


def test_prompts_of_other_phases_are_counted_and_printed(inputs, capsys):
    counts = count_shared_prompts(Ragged(inputs["tokens"], "train.prompt"), inputs)
    assert counts == {"sft": 2, "reward": 0}
    assert capsys.readouterr().err == (
        "note: 2 of 4 prompts are also prompts of sft: set split.by: prompt to keep the phases"
        " disjoint\n"
    )


# Responses.


def rollouts_of(*responses):
    """Rollouts of responses, given as (number of tokens, whether the last one is eos)."""
    lengths, ended = zip(*responses, strict=True)
    return SimpleNamespace(lengths=torch.tensor(lengths), ended=torch.tensor(ended))


def test_only_empty_responses_are_an_error():
    with pytest.raises(InputError) as error:
        ResponseCheck().check(rollouts_of((1, True), (1, True), (1, True)), 4)
    assert str(error.value) == (
        "step 4: all 3 responses are empty: the actor samples eos as its first token; check the"
        " responses that sft was trained on"
    )


@pytest.mark.parametrize("other", [(2, True), (1, False)])
def test_one_non_empty_response_is_accepted(other):
    check = ResponseCheck()
    check.check(rollouts_of((1, True), other), 4)
    assert check.num_unended == 0


def test_unended_responses_are_counted_until_one_ends(monkeypatch):
    monkeypatch.setattr(sanity_checks, "MAX_UNENDED", 6)
    unended, one_ended = rollouts_of((4, False), (4, False)), rollouts_of((4, False), (2, True))
    check = ResponseCheck()
    for step, expected in enumerate((2, 4, 0, 2, 4), start=1):
        check.check(one_ended if step == 3 else unended, step)
        assert check.num_unended == expected
    with pytest.raises(InputError) as error:
        check.check(unended, 6)
    assert str(error.value) == (
        "step 6: none of the last 6 responses ended within max_response_length tokens: increase it,"
        " or train sft on responses that are not truncated"
    )


@pytest.mark.parametrize("value", [0.1])
def test_equal_scores_of_a_reward_model_are_an_error(value):
    with pytest.raises(InputError) as error:
        ScoreCheck(has_rewards=True).check(torch.full((4,), value), 1)
    assert str(error.value) == (
        f"step 1: all 4 responses so far have the score {value:g}: without differences there is no"
        " training signal; check the reward model and functions"
    )


def test_a_function_may_return_equal_scores_for_a_while(monkeypatch):
    monkeypatch.setattr(sanity_checks, "MAX_EQUAL_SCORES", 10)
    equal = torch.zeros(4)
    check = ScoreCheck(has_rewards=False)
    check.check(equal, 1)
    restored = ScoreCheck(has_rewards=False)
    restored.load_state_dict(json.loads(json.dumps(check.state_dict())))
    restored.check(equal, 2)
    with pytest.raises(InputError, match="step 3: all 12 responses so far have the score 0:"):
        restored.check(equal, 3)
    # Another score than in earlier steps is a difference, after which any scores are accepted.
    check.check(equal + 1, 2)
    for step in range(3, 9):
        check.check(equal, step)


# First updates.


def metrics_of(ratio=1.0, kl=0.0):
    return {"policy/ratio": ratio, "policy/approxkl": kl}


@pytest.mark.parametrize(
    ("dtype", "ratio", "kl"),
    [("fp32", 1.0005, 5e-4), ("bf16", 0.96, 0.01)],
)
def test_rounding_errors_are_accepted(dtype, ratio, kl):
    check_first_update(metrics_of(ratio, kl), dtype, 1)


@pytest.mark.parametrize(
    ("dtype", "ratio", "kl"),
    [
        ("fp32", 0.998, 0.0),
        ("fp32", 1.0, 0.002),
        ("bf16", 0.94, 0.0),
        ("fp32", math.nan, 0.0),
    ],
)
def test_a_first_update_of_another_policy_is_an_error(dtype, ratio, kl):
    with pytest.raises(InputError) as error:
        check_first_update(metrics_of(ratio, kl), dtype, 7)
    assert str(error.value).startswith(
        f"step 7: before the first update the ratio of the policy to itself is {ratio:.4g} and its"
        f" KL {kl:.4g}, expected 1 and 0 within "
    )
