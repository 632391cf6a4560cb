"""SFT: the targets of each choice and perplexities, as transformers computes them."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.stages import stages_of_small_model

ROWS = [
    ("\n\nHuman: Hello.\n\nAssistant: Hi.\n\nHuman: A fruit?\n\nAssistant:", " An apple."),
    ("\n\nHuman: Name a fruit.\n\nAssistant:", " A pear."),
]
TARGETS = ("response", "all_turns", "all_tokens")
COMMON = {"model": "random", "datasets": ["toy"], "max_length": 90, "epochs": 1, "dtype": "fp32"}
COMMON |= {"global_batch_size": 8, "max_steps": 1, "placement": {"deployment": "cpu"}}
# They differ from their base model after one step.
RECIPES = {
    value: {**COMMON, "train_on": value, "learning_rate": 0.1, "warmup_steps": 0}
    for value in TARGETS
}


@pytest.fixture(scope="module")
def stages(tokenizer, tmp_path_factory):
    rows = {split: ROWS for split in ("train", "eval")}
    folder = tmp_path_factory.mktemp("sft")
    with stages_of_small_model(folder, tokenizer, rows, {"sft": RECIPES}) as stages:
        yield stages


def logprobs_of(folder, train_on):
    """The log-probabilities [N, V] of a model at the targets [N] of the rows, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    logprobs, targets = [], []
    for prompt, response in ROWS:
        first, greeting, rest = (prompt + response).partition(" Hi.")
        turns = [(first, greeting)] if rest and train_on == "all_turns" else []
        for before, text in [*turns, (prompt, response)]:
            start = tokenizer(before).input_ids
            ids = start + tokenizer(text, add_special_tokens=False).input_ids
            ids.append(tokenizer.eos_token_id)
            place = 1 if train_on == "all_tokens" else len(start)
            logits = model(torch.tensor([ids])).logits[0, place - 1 : -1].detach()
            logprobs.append(logits.log_softmax(dim=1))
            targets += ids[place:]
    return torch.cat(logprobs), targets


def nats_of(folder, train_on):
    """The negative log-probability of each target."""
    logprobs, targets = logprobs_of(folder, train_on)
    return (-logprobs[range(len(targets)), targets]).tolist()


def metrics_of(stages, name):
    """The first line of the metrics, and the one of the first step, a step of the base model."""
    lines = (stages.result("train_sft", name) / "metrics.jsonl").read_text().splitlines()
    lines = list(map(json.loads, lines))
    return lines[0], next(line for line in lines if line["step"] == 1)


@pytest.mark.parametrize("train_on", TARGETS)
def test_the_loss_is_that_of_transformers(stages, train_on):
    nats = nats_of(stages.models["random"], train_on)
    _, step = metrics_of(stages, train_on)
    assert step["tokens"] == len(nats)
    assert step["loss"] == pytest.approx(sum(nats) / len(nats), rel=1e-5)


def test_perplexities_are_those_of_transformers(stages):
    result = stages.result("evaluate_sft", "response")
    metrics = json.loads((result / "metrics.json").read_text())
    models = {"before": stages.models["random"], "after": stages.result("train_sft", "response")}
    for moment, folder in models.items():
        for prefix, tokens in (("", "all_tokens"), ("response_", "response")):
            nats = nats_of(folder, tokens)
            assert metrics[moment][f"{prefix}tokens"] == len(nats)
            expected = pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-4)
            assert metrics[moment][f"{prefix}perplexity"] == expected
    # The response of the row comes before the models' responses.
    lines = [json.loads(line) for line in (result / "responses.jsonl").read_text().splitlines()]
    assert [line["model"] for line in lines] == ["data"] * 2 + ["base"] * 2 + ["sft"] * 2
    assert sorted((line["prompt"], line["response"]) for line in lines[:2]) == sorted(ROWS)
    assert all(line["prompt"] == lines[n % 2]["prompt"] for n, line in enumerate(lines))
