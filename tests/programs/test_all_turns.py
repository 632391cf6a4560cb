"""SFT on all turns of the assistant, as transformers computes its loss."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.stages import stages_of_small_model

# DeepSpeed calls functions of torch that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

TURNS = ("\n\nHuman: Hello.\n\nAssistant: Hi.\n\nHuman: A fruit?\n\nAssistant:", " An apple.")
SINGLE = ("\n\nHuman: Name a fruit.\n\nAssistant:", " A pear.")
COMMON = {"model": "random", "datasets": ["toy"], "max_length": 90, "epochs": 1, "dtype": "fp32"}
COMMON |= {"global_batch_size": 8, "max_steps": 1, "placement": {"deployment": "cpu"}}
VALUES = ("response", "all_turns", "all_tokens")


@pytest.fixture(scope="module")
def stages(tokenizer, tmp_path_factory):
    recipes = {"sft": {value: {**COMMON, "train_on": value} for value in VALUES}}
    rows = {split: [TURNS, SINGLE, TURNS] for split in ("train", "eval")}
    folder = tmp_path_factory.mktemp("turns")
    with stages_of_small_model(folder, tokenizer, rows, recipes) as stages:
        yield stages


def first_step(stages, value):
    """The metrics of the first step, whose loss is that of the base model."""
    lines = (stages.result("train_sft", value) / "metrics.jsonl").read_text().splitlines()
    return next(line for line in map(json.loads, lines) if line["step"] == 1)


def test_the_loss_is_that_of_the_turns_in_transformers(stages):
    model = AutoModelForCausalLM.from_pretrained(stages.models["random"])
    tokenizer = AutoTokenizer.from_pretrained(stages.models["random"])
    nats = {value: [] for value in VALUES}
    for prompt, response in (TURNS, SINGLE, TURNS):
        first, _, rest = (prompt + response).partition(" Hi.")
        parts = [(first, " Hi."), (prompt, response)] if rest else [(prompt, response)]
        for before, text in parts:
            start = tokenizer(before).input_ids
            end = tokenizer(text, add_special_tokens=False).input_ids
            ids = torch.tensor([*start, *end, tokenizer.eos_token_id])
            logprobs = model(ids[None]).logits[0, :-1].detach().log_softmax(dim=-1)
            losses = -logprobs[range(len(ids) - 1), ids[1:]]
            nats["all_turns"] += losses[len(start) - 1 :].tolist()
            if text == response:
                nats["response"] += losses[len(start) - 1 :].tolist()
                nats["all_tokens"] += losses.tolist()
    for value, expected in nats.items():
        found = first_step(stages, value)
        assert found["tokens"] == len(expected)
        assert found["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)
