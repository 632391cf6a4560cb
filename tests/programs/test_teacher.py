"""SFT with a teacher: its stored tokens and the loss of the first step, against transformers."""

import json

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
    ("\n\nHuman: A fruit?\n\nAssistant:", " An apple."),
    ("\n\nHuman: Hi.\n\nAssistant:", " Hi."),
]
TOP_K = 5
# Its ids need more than 16 bits.
LARGE_VOCABULARY = 70_000
COMMON = {"model": "random", "datasets": ["toy"], "max_length": 90, "epochs": 1, "dtype": "fp32"}
COMMON |= {"global_batch_size": 8, "max_steps": 1, "placement": {"deployment": "cpu"}}
TAUGHT = {**COMMON, "teacher": "sft/plain", "teacher_top_k": TOP_K}
RECIPES = {
    # It differs from its base model after one step.
    "plain": {**COMMON, "learning_rate": 0.1, "warmup_steps": 0},
    "response": {**TAUGHT, "train_on": "response", "eval_steps": 1},
    "all_tokens": {**TAUGHT, "train_on": "all_tokens"},
    "too-many": {**TAUGHT, "teacher_top_k": 10**6},
}


@pytest.fixture(scope="module")
def stages(tokenizer, tmp_path_factory):
    rows = {split: ROWS for split in ("train", "eval")}
    folder = tmp_path_factory.mktemp("taught")
    with stages_of_small_model(folder, tokenizer, rows, {"sft": RECIPES}) as stages:
        yield stages


def logprobs_of(folder, with_prompts):
    """The log-probabilities [N, V] of a model at the target tokens of the rows, by transformers."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder),
    )
    found = []
    for prompt, response in ROWS:
        start = tokenizer(prompt).input_ids
        ids = [
            *start,
            *tokenizer(response, add_special_tokens=False).input_ids,
            tokenizer.eos_token_id,
        ]
        logits = model(torch.tensor([ids])).logits[0, :-1].detach()
        found.append(logits[0 if with_prompts else len(start) - 1 :].log_softmax(dim=1))
    return torch.cat(found)


@pytest.mark.parametrize("train_on", ["response", "all_tokens"])
def test_the_loss_is_the_divergence_in_transformers(stages, train_on):
    teacher, student = (
        logprobs_of(folder, with_prompts=train_on == "all_tokens")
        for folder in (stages.result("train_sft", "plain"), stages.models["random"])
    )
    stored = stages.result("compute_teacher", train_on)
    top = teacher.topk(TOP_K)
    for split in ("train", "eval"):
        logprobs = np.load(stored / f"{split}.logprobs.npy")
        tokens = torch.from_numpy(np.load(stored / f"{split}.tokens.npy").astype(np.int64))
        np.testing.assert_allclose(logprobs, top.values, atol=1e-4)
        torch.testing.assert_close(teacher.gather(1, tokens), top.values, atol=1e-4, rtol=0)
    p, q = top.values.exp(), student.gather(1, top.indices).exp()
    p, q = (torch.cat([x, 1 - x.sum(dim=1, keepdim=True)], dim=1) for x in (p, q))
    expected = (p * (p / q).log()).sum(dim=1).mean().item()
    lines = (stages.result("train_sft", train_on) / "metrics.jsonl").read_text().splitlines()
    first, *_ = steps = [json.loads(line) for line in lines]
    if train_on == "response":
        assert first["eval_loss"] == pytest.approx(expected, rel=1e-3)
    step = next(line for line in steps if line["step"] == 1)
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
