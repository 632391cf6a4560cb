"""What RLHF refuses: parts that do not go together, and responses that lead nowhere."""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from snakechat.algorithms import sanity_checks as gates
from snakechat.algorithms.sanity_checks import (
    check_first,
    check_probes,
    check_responses,
    check_tokenizers,
    shared_prompts,
)
from snakechat.data.tokens import Ragged, RaggedWriter
from snakechat.workflow.errors import InputError
from snakechat.workflow.manifest import manifest_path

FOLDERS = ("output/sft/a", "output/reward/b")


def write(folder, **arrays):
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in arrays.items():
        with RaggedWriter(folder, name.replace("_", "."), 300) as writer:
            writer.write(rows)
    return folder


# Tokenizers.


def test_tokenizers_that_are_the_same_go_together(tokenizer):
    check_tokenizers(tokenizer, copy.deepcopy(tokenizer), FOLDERS)


# One word more, or another one.
@pytest.mark.parametrize("words", [(["snake"], ["snake", "bird"]), (["snake"], ["bird"])])
def test_a_reward_model_with_another_vocabulary_is_refused(words, tokenizer):
    actor, reward = (copy.deepcopy(tokenizer) for _ in range(2))
    actor.add_tokens(words[0])
    reward.add_tokens(words[1])
    with pytest.raises(InputError) as refused:
        check_tokenizers(actor, reward, FOLDERS)
    assert str(refused.value) == (
        "output/sft/a and output/reward/b have different tokenizers: a reward model can only score"
        " tokens that it knows"
    )


@pytest.mark.parametrize("name", ["bos", "eos", "pad"])
def test_another_special_token_is_refused_by_its_name(name, tokenizer):
    other = copy.deepcopy(tokenizer)
    number = getattr(tokenizer, f"{name}_token_id")
    setattr(other, f"{name}_token", tokenizer.convert_ids_to_tokens(20))
    with pytest.raises(InputError) as refused:
        check_tokenizers(tokenizer, other, FOLDERS)
    assert str(refused.value) == (
        f"output/sft/a and output/reward/b have different tokens for {name}_token_id: {number} and"
        " 20: train both from models of one family"
    )


# Probes.


class LastToken(nn.Linear):
    """A scorer whose score is the last token's number times its weight."""

    supports_packing = True

    def __init__(self, weight=1.0):
        super().__init__(1, 1, bias=False)
        nn.init.constant_(self.weight, weight)

    def forward(self, batch, places):
        return self.weight[0] * batch.inputs.input_ids.flatten()[places]


@pytest.fixture
def probes(tmp_path):
    """(folder of a reward model, tokens): it scored the first two of three held-out pairs."""
    prompts = [[11, 12], [13], [14, 15]]
    chosen, rejected = [[21, 40], [60], [22, 23, 99]], [[80], [31, 20], [99]]
    tokens = write(tmp_path / "tokens", eval_prompt=prompts, eval_chosen=chosen)
    write(tokens, eval_rejected=rejected)
    folder = tmp_path / "reward"
    manifest = {"spec": {"path": str(folder), "inputs": {}}, "inputs": {}, "lineage": {}}
    # Mean 50, deviation sqrt((100 + 100 + 900 + 900) / 4) = 22.4.
    manifest |= {"files": {}, "facts": {"probe_scores": [[40.0, 60.0], [80.0, 20.0]]}}
    manifest_path(folder).write_text(json.dumps(manifest))
    return folder, tokens


def test_a_model_that_scores_as_recorded_is_taken(probes):
    check_probes(LastToken(), *probes, 100)


@pytest.mark.parametrize(("share", "taken"), [(0.09, True), (0.11, False), (-0.11, False)])
def test_what_another_device_may_change_is_a_tenth_of_the_deviation(share, taken, probes):
    # 80 is the largest score: it is farthest off.
    scorer = LastToken(1 + share * math.sqrt(500) / 80)
    if taken:
        check_probes(scorer, *probes, 100)
        return
    with pytest.raises(InputError) as refused:
        check_probes(scorer, *probes, 100)
    assert str(refused.value) == (
        f"{probes[0]} does not score its probes as recorded: they differ by 2.46, beside a"
        " deviation of 22.4: delete it and start the build again"
    )


@pytest.mark.parametrize("weight", [math.nan, math.inf, 0.0])
def test_a_model_that_is_broken_is_refused(weight, probes):
    with pytest.raises(InputError, match="does not score its probes as recorded"):
        check_probes(LastToken(weight), *probes, 100)


# Prompts.


@pytest.fixture
def inputs(tmp_path):
    """Folders of a job by name: four prompts of its own, some of them in other phases too."""
    own = write(tmp_path / "rlhf", train_prompt=[[11], [11, 12], [13], [14]])
    sft = write(tmp_path / "sft", train_prompt=[[11, 12], [12], [14], [14]])
    reward = write(tmp_path / "reward", train_prompt=[[12, 11], [1, 1], [13, 13]])
    # Neither the job's own prompts nor models and text to learn are other phases.
    return {"tokens": own, "actor": own, "ptx": own, "tokens.sft": sft, "tokens.reward": reward}


def test_prompts_of_other_phases_are_counted_and_told(inputs, capsys):
    found = shared_prompts(Ragged(inputs["tokens"], "train.prompt"), inputs)
    assert found == {"sft": 2, "reward": 0}
    assert capsys.readouterr().err == (
        "note: 2 of 4 prompts are also among those of sft: split.by: prompt keeps phases apart\n"
    )


def test_the_first_process_alone_tells_of_them(inputs, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    found = shared_prompts(Ragged(inputs["tokens"], "train.prompt"), inputs)
    assert found == {"sft": 2, "reward": 0}
    assert capsys.readouterr().err == ""


# Responses.


def responded(*responses):
    """Rollouts of responses that are (tokens, whether eos is the last one)."""
    lengths, ended = zip(*responses, strict=True)
    return SimpleNamespace(lengths=torch.tensor(lengths), ended=torch.tensor(ended))


def test_responses_that_are_all_empty_are_refused():
    with pytest.raises(InputError) as refused:
        check_responses(responded((1, True), (1, True), (1, True)), 0, 4)
    assert str(refused.value) == (
        "step 4: all 3 responses are empty: the actor ends at once; look at the responses that sft was"
        " trained on"
    )


@pytest.mark.parametrize("other", [(2, True), (1, False), (5, False)])
def test_one_response_that_is_not_empty_is_enough(other):
    assert check_responses(responded((1, True), other), 0, 4) == 0


def test_responses_that_do_not_end_are_counted_until_one_ends(monkeypatch):
    monkeypatch.setattr(gates, "NEVER_ENDS", 6)
    none, some = responded((4, False), (4, False)), responded((4, False), (2, True))
    unended = 0
    for step, expected in enumerate((2, 4), start=1):
        unended = check_responses(none, unended, step)
        assert unended == expected
    assert check_responses(some, unended, 3) == 0
    with pytest.raises(InputError) as refused:
        check_responses(none, 4, 9)
    assert str(refused.value) == (
        "step 9: none of the last 6 responses ended within max_response_length: make it larger, or"
        " train sft on responses that are not cut"
    )


# Passes.


def figures(ratio=1.0, kl=0.0):
    return {"policy/ratio": ratio, "policy/approxkl": kl}


@pytest.mark.parametrize(
    ("dtype", "ratio", "kl"),
    [("fp32", 1.0005, 5e-4), ("bf16", 0.96, 0.01), ("fp16", 1.04, 0.04)],
)
def test_rounding_may_part_an_actor_from_itself(dtype, ratio, kl):
    check_first(figures(ratio, kl), dtype, 1)


@pytest.mark.parametrize(
    ("dtype", "ratio", "kl"),
    [
        ("fp32", 1.002, 0.0),
        ("fp32", 0.998, 0.0),
        ("fp32", 1.0, 0.002),
        ("bf16", 0.94, 0.0),
        ("fp16", 1.0, 0.06),
        ("fp32", math.nan, 0.0),
        ("fp32", 1.0, math.nan),
        ("fp32", math.inf, 0.0),
    ],
)
def test_an_actor_that_is_another_in_training_is_refused(dtype, ratio, kl):
    with pytest.raises(InputError) as refused:
        check_first(figures(ratio, kl), dtype, 7)
    assert str(refused.value) == (
        f"step 7: before any update the actor's ratio to itself is {ratio:.4g} and its KL {kl:.4g},"
        " instead of 1 and 0: its passes do not agree"
    )
