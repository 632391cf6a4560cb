"""SFT: the targets of each choice, a teacher and perplexities, as transformers computes them."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import INIT
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Policy
from snakechat.modeling.models import make_causal
from snakechat.modeling.teacher_split import TeacherSplit
from snakechat.workflow.errors import InputError
from support.stages import stages_of_small_model

# DeepSpeed calls functions of torch that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

ROWS = [
    ("\n\nHuman: Hello.\n\nAssistant: Hi.\n\nHuman: A fruit?\n\nAssistant:", " An apple."),
    ("\n\nHuman: Name a fruit.\n\nAssistant:", " A pear."),
]
TARGETS = ("response", "all_turns", "all_tokens")
TOP_K = 5
# Its ids need more than 16 bits.
LARGE_VOCABULARY = 70_000
COMMON = {"model": "random", "datasets": ["toy"], "max_length": 90, "epochs": 1, "dtype": "fp32"}
COMMON |= {"global_batch_size": 8, "max_steps": 1, "placement": {"deployment": "cpu"}}
TAUGHT = {**COMMON, "teacher": "sft/response", "teacher_top_k": TOP_K}
# They differ from their base model after one step.
RECIPES = {
    value: {**COMMON, "train_on": value, "learning_rate": 0.1, "warmup_steps": 0}
    for value in TARGETS
}
RECIPES |= {
    "taught-response": {**TAUGHT, "train_on": "response", "eval_steps": 1},
    "taught-all_tokens": {**TAUGHT, "train_on": "all_tokens"},
    "too-many": {**TAUGHT, "teacher_top_k": 10**6},
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


@pytest.mark.parametrize("train_on", ["response", "all_tokens"])
def test_the_loss_with_a_teacher_is_the_divergence_in_transformers(stages, train_on):
    (teacher, _), (student, _) = (
        logprobs_of(folder, train_on)
        for folder in (stages.result("train_sft", "response"), stages.models["random"])
    )
    stored = stages.result("compute_teacher", f"taught-{train_on}")
    top = teacher.topk(TOP_K)
    for split in ("train", "eval"):
        logprobs = np.load(stored / f"{split}.logprobs.npy")
        tokens = torch.from_numpy(np.load(stored / f"{split}.tokens.npy").astype(np.int64))
        np.testing.assert_allclose(logprobs, top.values, atol=1e-4)
        torch.testing.assert_close(teacher.gather(1, tokens), top.values, atol=1e-4, rtol=0)
    p, q = top.values.exp(), student.gather(1, top.indices).exp()
    p, q = (torch.cat([x, 1 - x.sum(dim=1, keepdim=True)], dim=1) for x in (p, q))
    expected = (p * (p / q).log()).sum(dim=1).mean().item()
    first, step = metrics_of(stages, f"taught-{train_on}")
    if train_on == "response":
        assert first["eval_loss"] == pytest.approx(expected, rel=1e-3)
    assert step["tokens"] == len(teacher)
    assert step["loss"] == pytest.approx(expected, rel=1e-3)


def test_more_tokens_than_the_vocabulary_has_are_an_error(stages):
    with pytest.raises(InputError, match="teacher_top_k: found 1000000, expected at most"):
        stages.result("compute_teacher", "too-many")


@pytest.mark.parametrize("vocab_size", [LARGE_VOCABULARY, 300])
def test_tokens_of_a_large_output_layer_are_those_of_the_vocabulary(
    vocab_size, tokenizer, tmp_path
):
    policy = Policy(make_causal(INIT, tokenizer, 1))
    policy.model.resize_token_embeddings(LARGE_VOCABULARY, mean_resizing=False)
    split = TeacherSplit(tmp_path, "train", Examples([[2, 5]], [[7, 8, 3]]), False)
    split.compute(policy, TOP_K, vocab_size, 300)
    tokens = torch.from_numpy(np.load(tmp_path / "train.tokens.npy").astype(np.int64))
    logits = policy.model(torch.tensor([[2, 5, 7, 8]])).logits[0, 1:].detach()
    expected = logits[:, :vocab_size].topk(TOP_K).values
    torch.testing.assert_close(logits.gather(1, tokens), expected)
