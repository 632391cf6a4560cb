"""Evaluation of chat models: compared models, scores, judges, success and written files."""

import json
import math
import weakref

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

import evaluate_rlhf
from evaluate_rlhf import main
from snakechat.data import toy
from snakechat.training import placed_models
from support.evaluation import evaluated, evaluation_job  # noqa: F401
from support.llm_endpoint import llm_server, use_judge  # noqa: F401

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
        monkeypatch.setattr(placed_models, name, tracked(getattr(placed_models, name)))
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


def test_scores_are_those_of_transformers_and_functions(job, tokenizer, monkeypatch):
    encoded = [tokenizer(text, add_special_tokens=False).input_ids for text in (CORRECT, INCORRECT)]
    sampled = [[encoded[0]] * 3, [[*encoded[1], tokenizer.eos_token_id]] * 3]

    def length(prompts, responses, columns):
        # No score of the second response to a prompt.
        return np.array([len(r) if r == CORRECT else math.nan for r in responses])

    job.settings.exact_check = None
    monkeypatch.setattr(evaluate_rlhf, "sample_on_all_ranks", lambda *_: (sampled, None))
    monkeypatch.setattr(evaluate_rlhf, "load_functions", lambda _: {"length": (2.0, length)})
    _, responses = evaluated(job)
    for key, name, weight in (("score", "reward", 2), ("judge_score", "judge", 0)):
        scorer = AutoModelForSequenceClassification.from_pretrained(job.inputs[name]).eval()
        for number, response in enumerate(responses["rlhf"]):
            # At the last token.
            ids = tokenizer(response["prompt"]).input_ids + sampled[number % 2][0]
            with torch.no_grad():
                score = scorer(torch.tensor([ids])).logits.item()
            expected = score + (number % 2 == 0) * weight * len(CORRECT)
            assert response[key] == pytest.approx(expected, abs=1e-4)


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

    def sample(sampler, prompts, sampling):
        settings = sampler.max_response_length, sampler.temperature, sampler.num_generations
        calls.append((len(prompts), *settings))
        return sampled if sampler.temperature else greedy, None

    monkeypatch.setattr(evaluate_rlhf, "sample_on_all_ranks", sample)
    check = lambda prompt, response: response == CORRECT  # noqa: E731
    monkeypatch.setitem(evaluate_rlhf.EXACT_CHECKS, "shop", check)
    # Where there is an exact check, functions do not decide what passes.
    functions = {"none": (1.0, lambda prompts, responses, columns: np.zeros(len(responses)))}
    monkeypatch.setattr(evaluate_rlhf, "load_functions", lambda _: functions)
    metrics, _ = evaluated(job)
    assert calls == 3 * [(3, 6, 1.0, 2), (3, 6, 0, 1)]
    for name in ("sft", "rlhf"):
        assert metrics[name]["success"] == pytest.approx(3 / 6)
        assert metrics[name]["greedy_success"] == pytest.approx(2 / 3)
        assert metrics[name]["pass_at_1"] == pytest.approx(3 / 6)
        assert metrics[name]["ended_by_eos"] == pytest.approx(4 / 6)

    def is_correct(prompts, responses, columns):
        return np.array([float(response == CORRECT) for response in responses])

    # No score of another function makes up for an incorrect response, and it may judge no other.
    def of_incorrect(prompts, responses, columns):
        return np.array([math.nan if response == CORRECT else 5.0 for response in responses])

    # Without an exact check and a reward model, functions alone score, greedy responses too.
    job.settings.exact_check = job.settings.reward = job.settings.judge = None
    functions = {"check": (2.0, is_correct), "other": (1.0, of_incorrect)}
    monkeypatch.setattr(evaluate_rlhf, "load_functions", lambda _: functions)
    metrics, responses = evaluated(job)
    for name in ("sft", "rlhf"):
        assert metrics[name]["score"] == metrics[name]["function_score"]
        assert metrics[name]["function_score"] == pytest.approx((2 * 4 + 5 * 2) / 6)
        assert metrics[name]["greedy_function_score"] == pytest.approx((2 * 2 + 5) / 3)
        assert metrics[name]["pass_at_1"] == pytest.approx(4 / 6)
        assert "greedy_function_score" in metrics["intervals_95"][name]
    assert not {"success", "greedy_success", "judge_score"} & metrics["rlhf"].keys()
    assert "judge_score" not in responses["rlhf"][0]
    assert len(calls) == 12


# --- LLM judges ----------------------------------------------------------------------------------


def test_an_llm_judge_compares_the_first_responses_of_rlhf_and_sft(job, server):
    use_judge(job, server)
    job.settings.llm_judge = "wise"
    server.replies = ["A", "B"]
    metrics, responses = evaluated(job)
    # The first and the last of three prompts, both orders; each has two lines of responses.
    assert len(server.texts) == 4
    for number, text in enumerate(server.texts):
        row = (0, 4)[number // 2]
        ours, theirs = (responses[model][row]["response"].strip() for model in ("rlhf", "sft"))
        first, second = text.split("[RESPONSE A ")[1].split("[RESPONSE B ")
        assert (ours in first and theirs in second) if number % 2 == 0 else ours in second
        assert responses["rlhf"][row]["prompt"].strip() in text
    lines = (job.result / "llm_judge.jsonl").read_text().splitlines()
    assert [json.loads(line)["messages"][1]["content"] for line in lines] == server.texts
    # A, B, then B twice: a win, and a tie.
    rates = metrics["wins"]["rlhf"]["sft"]["llm_judge"]
    assert (rates["mean"], rates["prompts"], rates["unreadable"]) == (0.75, 2, 0)
    # Two prompts say nearly nothing about others.
    assert 0 <= rates["interval_95"][0] < 0.1 and rates["interval_95"][1] == 1
    assert "longer" in rates
    assert job.record["llm_judges"]["wise"]["requests"] == 4


def test_the_score_is_the_weighted_sum_of_ratings_and_of_the_other_sources(job, server):
    use_judge(job, server)
    job.settings.reward = {"llm_judges/wise": 0.5}
    job.settings.reward_functions = {"length_bounds": 0}
    server.replies = [lambda body: str(1 + len(body["messages"][1]["content"]) % 9)]
    metrics, responses = evaluated(job)
    scores = [line["score"] for lines in responses.values() for line in lines]
    assert len(scores) == 3 * 3 * 2 and set(scores) <= {n / 2 for n in range(1, 10)}
    assert len(set(scores)) > 1
    unreadable = {"base": 0, "sft": 0, "rlhf": 0}
    assert job.facts["unreadable_replies"] == {"llm_judges/wise": unreadable}
    assert "llm_judge" not in metrics["wins"]["rlhf"]["sft"]
