"""RLHF from plain model folders: an actor and a classifier of another family, no other recipe."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from conftest import INIT
from snakechat.data.tokenizers import load_tokenizer
from snakechat.modeling.loading import load_scorer
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from support.configs import load
from support.families import CHECKPOINTS, save_checkpoint
from support.stages import Stages, toy_rows

# With the dialogue format. The classifier is a Qwen2 with its own chat template.
ACTOR = {**INIT, "max_position_embeddings": 128}
RECIPE = {
    "actor": "models/actor",
    "reward": "models/scorer",
    "judge": None,
    "datasets": ["toy"],
    "max_prompt_length": 64,
    "max_response_length": 8,
    "rollout_batch_size": 64,
    "global_batch_size": 64,
    "actor_learning_rate": 1.0e-3,
    "critic_learning_rate": 1.0e-3,
    "warmup_steps": 0,
    "log_responses_steps": 1,
    "dtype": "fp32",
    "placement": "cpu",
}

CONFIG = {
    "models": {
        "actor": {"path": "actor", "template": "dialogue"},
        "scorer": {"path": "scorer", "template": "chat"},
    },
    "rlhf": {"recipes": {"plain": RECIPE}},
}


@pytest.fixture(scope="module")
def stages(tmp_path_factory, tokenizer, group):
    """The results of the recipe, in a working directory of their own."""
    folder = tmp_path_factory.mktemp("plain")
    before = Path.cwd()
    os.chdir(folder)
    save_model(make_causal(ACTOR, tokenizer, 1), tokenizer, folder / "actor")
    base = save_checkpoint(CHECKPOINTS["qwen2.5"], folder / "base")
    chatml = load_tokenizer(base)
    torch.manual_seed(2)
    save_model(load_scorer(base, "fp32", chatml, new_head=True), chatml, folder / "scorer")
    models = {name: folder / name for name in ("actor", "scorer")}
    yield Stages(load(CONFIG), folder, toy_rows(192), models)
    os.chdir(before)


@pytest.fixture(scope="module")
def result(stages):
    """The trained actor."""
    return stages.result("train_rlhf", "plain")


def test_the_critic_starts_from_the_actor_and_no_other_recipe_is_built(stages, result):
    run = json.loads((result / "run.json").read_text())
    actor, critic = run["models"]["actor"], run["models"]["critic"]
    # A score for each hidden state more, and a tied output layer as large as the embeddings.
    assert critic["weights"] == actor["weights"] + ACTOR["hidden_size"]
    assert not {"train_sft", "train_reward", "train_dpo"} & {rule for rule, _ in stages.made}


def test_logged_scores_are_those_of_the_classifier_on_its_own_rendering(stages, result):
    tokenizer = AutoTokenizer.from_pretrained(stages.models["scorer"])
    scorer = AutoModelForSequenceClassification.from_pretrained(stages.models["scorer"]).eval()
    lines = (result / "responses.jsonl").read_text().splitlines()
    for line in map(json.loads, lines[:8]):
        question = line["prompt"].removeprefix("\n\nHuman:").removesuffix("\n\nAssistant:").strip()
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": line["response"].removeprefix(" ")},
        ]
        ids = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=False)
        with torch.no_grad():
            assert scorer(ids).logits.item() == pytest.approx(line["score"], abs=1e-4)
