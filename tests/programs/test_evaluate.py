"""Evaluation of chat models: compared models, scores, judges, success and written files."""

import shutil
import weakref

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

import evaluate_rlhf
from conftest import INIT
from evaluate_rlhf import main
from snakechat.data import toy
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from snakechat.training import evaluated_models
from snakechat.workflow.errors import InputError
from support.evaluation import evaluated, evaluation_job  # noqa: F401

CORRECT = " Hello Pia, get a pie at the bakery. You are welcome!"
INCORRECT = " Hello Pia, get a pie at the garage. You are welcome!"


def test_one_model_is_loaded_at_a_time(job, monkeypatch):
    loaded = []

    def tracked(load):
        def load_one(*arguments, **named):
            assert [model for model in loaded if model() is not None] == []
            model = load(*arguments, **named)
            loaded.append(weakref.ref(model))
            return model

        return load_one

    for name in ("load_causal", "load_scorer"):
        monkeypatch.setattr(evaluated_models, name, tracked(getattr(evaluated_models, name)))
    main(job)
    # base, sft, rlhf; sft again for the KL; reward model and judge.
    assert len(loaded) == 6


def test_each_model_responds_to_each_prompt_and_is_scored_by_reward_model_and_judge(job):
    metrics, responses = evaluated(job)
    assert list(responses) == ["base", "sft", "rlhf"]
    texts = toy.all_prompts()[:5]
    for name, lines in responses.items():
        prompts = [line["prompt"] for line in lines]
        # Three of the five, in their order, with two responses each.
        assert prompts == [text for text in texts if text in prompts for _ in range(2)]
        assert len(prompts) == 6
        for key in ("score", "judge_score"):
            mean = np.mean([line[key] for line in lines])
            assert metrics[name][key] == pytest.approx(mean, rel=1e-6)
        assert all(line["score"] != line["judge_score"] for line in lines)
    assert responses["sft"] != responses["rlhf"]
    # Two loads of the same weights may differ by rounding.
    assert metrics["sft"]["kl_to_sft"] == pytest.approx(0, abs=1e-4)
    assert metrics["rlhf"]["kl_to_sft"] > 0.01 < abs(metrics["base"]["kl_to_sft"])
    assert {key for key in metrics if key.endswith("_difference")} == {
        f"{model}{key}_difference"
        for model in ("", "base_")
        for key in ("score", "judge_score", "success")
    }
    assert metrics["wins"]["rlhf"].keys() == {"sft", "base"}
    assert metrics["wins"]["rlhf"]["sft"].keys() == {"score", "judge_score"}


def test_scores_are_those_of_transformers_at_the_last_token(job, tokenizer, monkeypatch):
    encoded = [tokenizer(text, add_special_tokens=False).input_ids for text in (CORRECT, INCORRECT)]
    sampled = [[encoded[0]] * 3, [[*encoded[1], tokenizer.eos_token_id]] * 3]
    job.settings.exact_check = None
    monkeypatch.setattr(evaluate_rlhf, "sample_equally", lambda *_: sampled)
    _, responses = evaluated(job)
    for key, name in (("score", "reward"), ("judge_score", "judge")):
        scorer = AutoModelForSequenceClassification.from_pretrained(job.inputs[name]).eval()
        for number, response in enumerate(responses["rlhf"]):
            ids = tokenizer(response["prompt"]).input_ids + sampled[number % 2][0]
            with torch.no_grad():
                score = scorer(torch.tensor([ids])).logits.item()
            assert response[key] == pytest.approx(score, abs=1e-4)


def test_ema_weights_are_compared_if_they_exist(job):
    shutil.copytree(job.inputs["sft"], job.inputs["rlhf"] / "ema")
    metrics, responses = evaluated(job)
    # A copy of the SFT model, with the same seed.
    texts = {name: [line["response"] for line in lines] for name, lines in responses.items()}
    assert texts["ema"] == texts["sft"] != texts["rlhf"]
    assert metrics["ema"] == pytest.approx(metrics["sft"], abs=1e-4)


def test_functions_add_to_the_score_of_the_reward_model_and_not_to_the_judges(job, monkeypatch):
    _, before = evaluated(job)

    def score(prompts, responses, columns):
        return np.array([float(len(p + a)) for p, a in zip(prompts, responses, strict=True)])

    monkeypatch.setattr(evaluate_rlhf, "load_functions", lambda _: {"length": (1.0, score)})
    _, after = evaluated(job)
    for name, lines in after.items():
        for old, new in zip(before[name], lines, strict=True):
            assert new["judge_score"] == pytest.approx(old["judge_score"], abs=1e-4)
            length = len(new["prompt"] + new["response"])
            assert new["score"] == pytest.approx(old["score"] + length, rel=1e-6)
    # Without a reward model, functions alone score.
    del job.inputs["reward"], job.inputs["judge"]
    job.settings.reward = job.settings.judge = None
    metrics, alone = evaluated(job)
    for lines in alone.values():
        assert all(line["score"] == len(line["prompt"] + line["response"]) for line in lines)
    assert "judge_score" not in metrics["rlhf"] and "judge_score" not in alone["rlhf"][0]


def test_success_requires_a_correct_response_with_eos(job, tokenizer, monkeypatch):
    eos = [tokenizer.eos_token_id]
    correct, incorrect = (
        tokenizer(text, add_special_tokens=False).input_ids for text in (CORRECT, INCORRECT)
    )
    sampled = [
        [correct + eos, correct, correct + eos],
        [incorrect + eos, correct + eos, incorrect],
    ]
    greedy = [[correct + eos, incorrect + eos, correct + eos]]
    calls = []

    def sample(model, prompts, stop_ids, length, temperature, max_tokens, num_generations):
        calls.append((len(prompts), length, temperature, max_tokens, num_generations))
        return sampled if temperature else greedy

    monkeypatch.setattr(evaluate_rlhf, "sample_equally", sample)
    check = lambda prompt, response: response == CORRECT  # noqa: E731
    monkeypatch.setitem(evaluate_rlhf.EXACT_CHECKS, "shop", check)
    metrics, _ = evaluated(job)
    assert calls == 3 * [(3, 6, 1.0, 300, 2), (3, 6, 0, 300, 1)]
    for name in ("sft", "rlhf"):
        assert metrics[name]["success"] == pytest.approx(3 / 6)
        assert metrics[name]["greedy_success"] == pytest.approx(2 / 3)
        assert metrics[name]["ended_by_eos"] == pytest.approx(4 / 6)
    job.settings.exact_check = None
    metrics, _ = evaluated(job)
    assert "success" not in metrics["rlhf"] and "greedy_success" not in metrics["rlhf"]
    assert len(calls) == 9

    def is_correct(prompts, responses, columns):
        return np.array([float(response == CORRECT) for response in responses])

    # Without an exact check, greedy responses are scored by the reward functions.
    monkeypatch.setattr(evaluate_rlhf, "load_functions", lambda _: {"check": (2.0, is_correct)})
    metrics, _ = evaluated(job)
    for name in ("sft", "rlhf"):
        assert metrics[name]["function_score"] == pytest.approx(2 * 4 / 6)
        assert metrics[name]["greedy_function_score"] == pytest.approx(2 * 2 / 3)
        assert "greedy_function_score" in metrics["intervals_95"][name]
    assert len(calls) == 15


def test_from_a_plain_model_the_chat_model_is_compared_with_the_base_model(job):
    del job.inputs["sft"]
    metrics, responses = evaluated(job)
    assert list(responses) == ["base", "rlhf"]
    assert metrics["base"]["kl_to_base"] == pytest.approx(0, abs=1e-4)
    assert metrics["rlhf"]["kl_to_base"] > 0.01
    assert metrics["wins"].keys() == {"rlhf"} and metrics["wins"]["rlhf"].keys() == {"base"}
    difference = metrics["rlhf"]["score"] - metrics["base"]["score"]
    assert metrics["score_difference"]["mean"] == pytest.approx(difference)


def test_a_model_with_too_few_positions_is_an_error(job, tokenizer):
    small = make_causal({**INIT, "max_position_embeddings": 8}, tokenizer, 1)
    save_model(small, tokenizer, job.inputs["base"])
    with pytest.raises(InputError, match=r"base: .* exceed the model's 8 positions"):
        main(job)
