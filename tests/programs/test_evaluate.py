"""Evaluation of chat models: what is compared with what, by whom it is judged, what is told."""

import json
import random
import shutil
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForSequenceClassification

import evaluate_rlhf
from conftest import INIT
from evaluate_rlhf import main
from init_model import train_tokenizer
from snakechat.data import toy
from snakechat.data.tokens import RaggedWriter
from snakechat.modeling.models import load_scorer, make_causal, save_model
from snakechat.workflow.errors import InputError

PLACEMENT = {"gpus_per_node": 0, "micro_batch_tokens": 300}
RIGHT = " Hello Pia, get a pie at the bakery. You are welcome!"
WRONG = " Hello Pia, get a pie at the garage. You are welcome!"


@pytest.fixture
def job(tokenizer, tmp_path):
    """A job that compares a model of other weights with the SFT model, and has a judge."""
    # The toy's responses are longer than the usual small model's.
    init = {**INIT, "max_position_embeddings": 128}
    folders = {name: tmp_path / name for name in ("base", "sft", "rlhf", "reward", "judge")}
    for seed, (name, place) in enumerate(folders.items()):
        model = make_causal(init, tokenizer, seed)
        save_model(model, tokenizer, place)
        if name in ("reward", "judge"):
            torch.manual_seed(seed)
            model = load_scorer(place, "fp32", tokenizer, new_head=True)
            shutil.rmtree(place)
            save_model(model, tokenizer, place)
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    prompts = [tokenizer(prompt).input_ids for prompt in toy.all_prompts()[:5]]
    with RaggedWriter(tokens, "eval.prompt", len(tokenizer)) as writer:
        writer.write(prompts)
    result = tmp_path / "result"
    result.mkdir()
    settings = {"num_prompts": 3, "num_generations": 2, "temperature": 1.0, "bootstrap_resamples": 100, "seed": 1}
    settings |= {"dtype": "fp32", "max_response_length": 6, "exact_check": "shop"}
    settings |= {"endpoint": None}
    return SimpleNamespace(
        settings=SimpleNamespace(**settings, reward_functions={}),
        placement=PLACEMENT,
        inputs={**folders, "tokens": tokens},
        result=result,
    )


def evaluated(job):
    """Figures, and responses by model."""
    main(job)
    responses = {}
    for line in (job.result / "responses.jsonl").read_text().splitlines():
        response = json.loads(line)
        responses.setdefault(response.pop("model"), []).append(response)
    return json.loads((job.result / "metrics.json").read_text()), responses


def test_one_model_at_a_time_is_there(job, monkeypatch):
    loaded = []

    def noted(load):
        def one(*arguments):
            assert [there for there in loaded if there() is not None] == []
            model = load(*arguments)
            loaded.append(weakref.ref(model))
            return model

        return one

    for name in ("load_causal", "load_scorer"):
        monkeypatch.setattr(evaluate_rlhf, name, noted(getattr(evaluate_rlhf, name)))
    main(job)
    # base, sft, rlhf; sft for the KL to it; reward model and judge.
    assert len(loaded) == 6


def test_each_model_responses_each_prompt_and_is_scored_by_reward_model_and_judge(job):
    figures, responses = evaluated(job)
    assert list(responses) == ["base", "sft", "rlhf"]
    asked = [prompt for prompt in toy.all_prompts()[:3] for _ in range(2)]
    for name, told in responses.items():
        assert [response["prompt"] for response in told] == asked
        for key in ("score", "judge_score"):
            mean = np.mean([response[key] for response in told])
            assert figures[name][key] == pytest.approx(mean, rel=1e-6)
        assert all(response["score"] != response["judge_score"] for response in told)
    assert responses["sft"] != responses["rlhf"]
    assert figures["sft"]["kl_to_sft"] == 0 < figures["rlhf"]["kl_to_sft"]
    assert figures["base"]["kl_to_sft"] != 0
    told = {key for key in figures if key.endswith("_difference")}
    assert told == {
        f"{model}{key}_difference"
        for model in ("", "base_")
        for key in ("score", "judge_score", "success")
    }
    assert figures["wins"]["rlhf"].keys() == {"sft", "base"}
    assert figures["wins"]["rlhf"]["sft"].keys() == {"score", "judge_score"}


def test_a_score_is_read_at_the_end_of_prompt_and_response(job, tokenizer, monkeypatch):
    encoded = [tokenizer(text, add_special_tokens=False).input_ids for text in (RIGHT, WRONG)]
    sampled = [[encoded[0]] * 3, [[*encoded[1], tokenizer.eos_token_id]] * 3]
    job.settings.exact_check = None
    monkeypatch.setattr(evaluate_rlhf, "sample_responses", lambda *_: sampled)
    _, responses = evaluated(job)
    for key, name in (("score", "reward"), ("judge_score", "judge")):
        scorer = AutoModelForSequenceClassification.from_pretrained(job.inputs[name]).eval()
        for number, response in enumerate(responses["rlhf"]):
            ids = tokenizer(response["prompt"]).input_ids + sampled[number % 2][0]
            with torch.no_grad():
                score = scorer(torch.tensor([ids])).logits.item()
            assert response[key] == pytest.approx(score, abs=1e-4)


def test_the_average_of_weights_is_compared_where_there_is_one(job):
    shutil.copytree(job.inputs["sft"], job.inputs["rlhf"] / "ema")
    figures, responses = evaluated(job)
    # This one has the weights of the SFT model, and the same draws.
    assert responses["ema"] == responses["sft"] != responses["rlhf"]
    assert figures["ema"] == figures["sft"]
    for key in ("score", "judge_score", "success"):
        assert figures[f"ema_{key}_difference"] == {"mean": 0, "interval_95": [0, 0]}


def test_models_beside_are_asked_as_well(job):
    job.inputs["compare_with.dpo/tiny"] = job.inputs["base"]
    figures, responses = evaluated(job)
    assert list(responses) == ["base", "sft", "dpo/tiny", "rlhf"]
    assert responses["dpo/tiny"] == responses["base"]
    # Equal weights, equal draws: every meeting of a response with itself is half a win.
    score = figures["wins"]["dpo/tiny"]["base"]["score"]
    assert score["mean"] == 0.5


def test_functions_are_added_to_the_reward_model_and_not_to_the_judge(job, monkeypatch):
    _, before = evaluated(job)
    functions = {"length": 2, "unused": 0}

    class Functions:
        def __init__(self, weights):
            assert weights == functions

        def __call__(self, prompts, responses):
            return np.array([float(len(p + a)) for p, a in zip(prompts, responses, strict=True)])

    monkeypatch.setattr(evaluate_rlhf, "RewardFunctions", Functions)
    job.settings.reward_functions = functions
    figures, after = evaluated(job)
    for name, told in after.items():
        for old, new in zip(before[name], told, strict=True):
            assert new["judge_score"] == old["judge_score"]
            length = len(new["prompt"] + new["response"])
            assert new["score"] == pytest.approx(old["score"] + length, rel=1e-6)
    # Without a reward model they are all that scores.
    del job.inputs["reward"], job.inputs["judge"]
    figures, alone = evaluated(job)
    for told in alone.values():
        assert all(line["score"] == len(line["prompt"] + line["response"]) for line in told)
    assert "judge_score" not in figures["rlhf"] and "judge_score" not in alone["rlhf"][0]


def test_success_takes_a_right_response_that_ended(job, tokenizer, monkeypatch):
    eos = [tokenizer.eos_token_id]
    right, wrong = (tokenizer(text, add_special_tokens=False).input_ids for text in (RIGHT, WRONG))
    sampled = [[right + eos, right, right + eos], [wrong + eos, right + eos, wrong]]
    greedy = [[right + eos, wrong + eos, right + eos]]
    asked = []

    def sample(model, prompts, tokenizer, length, temperature, max_tokens, samples):
        asked.append((len(prompts), length, temperature, max_tokens, samples))
        return sampled if temperature else greedy

    monkeypatch.setattr(evaluate_rlhf, "sample_responses", sample)
    monkeypatch.setattr(toy, "is_right", lambda prompt, response: response == RIGHT)
    monkeypatch.setitem(evaluate_rlhf.EXACT_CHECKS, "shop", toy.is_correct)
    figures, _ = evaluated(job)
    assert asked == 3 * [(3, 6, 1.0, 300, 2), (3, 6, 0, 300, 1)]
    for name in ("sft", "rlhf"):
        assert figures[name]["success"] == pytest.approx(3 / 6)
        assert figures[name]["greedy_success"] == pytest.approx(2 / 3)
        assert figures[name]["ended_by_eos"] == pytest.approx(4 / 6)
    job.settings.exact_check = None
    figures, _ = evaluated(job)
    assert "success" not in figures["rlhf"] and "greedy_success" not in figures["rlhf"]
    assert len(asked) == 9


def test_a_judge_of_another_tokenizer_is_refused(job):
    rows, _ = toy.make_rows(100, 10, random.Random(1))
    other = train_tokenizer((text for row in rows for text in row.values()), 290)
    model = make_causal(INIT, other, 1)
    shutil.rmtree(job.inputs["judge"])
    save_model(model, other, job.inputs["judge"])
    with pytest.raises(InputError, match="judge have different tokenizers"):
        main(job)


# --- in a build -------------------------------------------------------------------------------


def built(workflow, **settings):
    """Figures of the tiny recipe, built with other settings."""
    more = workflow.folder / "more.yaml"
    more.write_text(yaml.safe_dump({"rlhf": {"recipes": {"tiny": settings}}}))
    workflow.options += (more.name,)
    workflow.build("output/rlhf/tiny")
    return json.loads((workflow.folder / "output/eval/rlhf/tiny/metrics.json").read_text())


def test_a_judge_is_asked_without_training_anew(quick, tmp_path):
    copy = quick.copy(tmp_path / "copy")
    metrics = copy.folder / "output/eval/rlhf/tiny/metrics.json"
    weights = copy.folder / "output/rlhf/tiny/model.safetensors"
    before, trained = json.loads(metrics.read_text()), weights.stat().st_mtime_ns
    # Here it is the reward model itself.
    after = built(copy, judge="tiny")
    assert weights.stat().st_mtime_ns == trained
    for name in ("sft", "rlhf"):
        assert after[name] == before[name] | {"judge_score": before[name]["score"]}
    assert after["judge_score_difference"] == after["score_difference"]


def test_functions_alone_can_score(quick, tmp_path):
    copy = quick.copy(tmp_path / "copy")
    # The quick SFT model is not right once.
    text = "def score(prompts, responses):\n    return [response.count(' ') for response in responses]\n"
    (copy.folder / "rewards/blanks.py").write_text(text)
    settings = {"algorithm": "grpo", "num_generations": 4, "rollout_batch_size": 32}
    figures = built(copy, reward=None, reward_functions={"blanks": 2}, **settings)
    lines = (copy.folder / "output/eval/rlhf/tiny/responses.jsonl").read_text().splitlines()
    responses = [json.loads(line) for line in lines]
    assert all(response["score"] == 2 * response["response"].count(" ") for response in responses)
    assert figures["rlhf"]["score"] != figures["sft"]["score"]
    inputs = copy.spec_of("output/rlhf/tiny")["inputs"]
    assert inputs.keys() == {"actor", "tokens", "tokens.sft"}
    drawn = {path.name for path in (copy.folder / "output/report/tiny").glob("*.svg")}
    pictures = ("lineage", "data", "sft", "rlhf", "wins", "costs", "throughput")
    assert drawn == {f"{name}.svg" for name in pictures}
