"""Whole builds: what the models learn, which files exist, what loads."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

PROMPT = "\n\nHuman: My name is Carl and I need a hat.\n\nAssistant:"


def figures(workflow, stage):
    return json.loads((workflow.folder / f"output/eval/{stage}/tiny/metrics.json").read_text())


def test_sft_reward_model_and_ppo_learn(tiny):
    sft, reward, rlhf = (figures(tiny, stage) for stage in ("sft", "reward", "rlhf"))
    assert sft["after"]["perplexity"] < sft["before"]["perplexity"] / 2
    assert reward["accuracy"] >= 0.90
    assert reward["ties"] < 0.005
    # Length alone does not rank them.
    assert reward["longer_wins_accuracy"] < 0.6
    assert rlhf["success_difference"]["mean"] >= 0.20
    assert rlhf["success_difference"]["interval_95"][0] > 0
    assert rlhf["rlhf"]["ended_by_eos"] >= 0.95
    assert 0 < rlhf["rlhf"]["kl_to_sft"] < 5


def test_dpo_ranks_pairs_correctly(tiny):
    tiny.build("output/dpo/tiny")
    dpo = figures(tiny, "dpo")
    assert dpo["accuracy"] >= 0.90 and dpo["longer_wins_accuracy"] < 0.6
    assert dpo["margin"] == pytest.approx(dpo["chosen_score"] - dpo["rejected_score"], rel=1e-3)


def test_a_missing_card_is_written_and_an_edited_one_stays(quick, tmp_path):
    copy = quick.copy(tmp_path / "copy")
    sft, reward = (copy.folder / f"output/{stage}/tiny/README.md" for stage in ("sft", "reward"))
    text = reward.read_text()
    reward.unlink()
    edited = sft.read_text() + "Mine.\n"
    sft.write_text(edited)
    assert copy.planned() == set()
    copy.build("output/rlhf/tiny")
    assert reward.read_text() == text
    assert sft.read_text() == edited


def test_chat_model_loads_and_responds(tiny):
    folder = tiny.folder / "output/rlhf/tiny"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(PROMPT, return_tensors="pt")
    response = model.generate(**tokens, do_sample=False, max_new_tokens=24)[0]
    text = tokenizer.decode(response[tokens.input_ids.shape[1] :], skip_special_tokens=True)
    assert text.startswith(" Hello Carl, get a hat at the boutique.")
    assert response[-1] == tokenizer.eos_token_id


def test_reward_model_loads_and_scores(tiny):
    folder = tiny.folder / "output/reward/tiny"
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    good = f"{PROMPT} Hello Carl, get a hat at the boutique. You are welcome!</s>"
    bad = f"{PROMPT} Hello Fay, get a pie at the garage. Now go away!</s>"
    with torch.no_grad():
        scores = model(**tokenizer([good, bad], return_tensors="pt", padding=True)).logits[:, 0]
    assert scores[0] > scores[1] + 1


def test_a_finished_build_has_nothing_to_do_no_partial_results_and_no_pickled_weights(tiny):
    assert tiny.planned() == set()
    names = {path.name for path in (tiny.folder / "output").rglob("*")}
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl", ".pth"))]
    hidden = {name for name in names if name.startswith(".")}
    # That of the build, which is released. Locks and checkpoints of results are deleted.
    assert hidden == {".identity", ".lock"}
