"""Training programs, in this process on a small model, and on the quick build."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_reward
from conftest import INIT
from snakechat.algorithms.preference import pairwise_loss
from snakechat.config.reward import RewardSettings
from snakechat.data.ragged_arrays import RaggedWriter
from snakechat.modeling.batching import Examples
from snakechat.modeling.forward import Scorer, response_scores
from snakechat.modeling.loading import load_scorer
from snakechat.modeling.models import make_causal
from snakechat.modeling.saving import save_model
from snakechat.workflow.placement import placement_of
from snakechat.workflow.run_options import RunOptions
from support.configs import load

# DeepSpeed calls functions of torch that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

PLACEMENT = placement_of({"micro_batch_tokens": 300})
REWARD_SETTINGS = load().program_settings("reward", "tiny")
REWARD_SETTINGS |= {"seed": 1, "epochs": 1, "global_batch_size": 4, "max_length": 16}
REWARD_SETTINGS |= {"learning_rate": 0.01, "lr_schedule": "constant", "min_lr_ratio": 0.0}
REWARD_SETTINGS |= {"template": "dialogue", "lora_alpha": 8}


def test_perplexities_are_those_of_transformers(quick):
    model = AutoModelForCausalLM.from_pretrained(quick.folder / "output/sft/tiny").float()
    rows = Examples.read(quick.folder / "output/tokens/sft/tiny", "eval", "chosen")
    losses = {"": [], "response_": []}
    for prompt, response in zip(rows.prompts, rows.responses[0], strict=True):
        ids = torch.tensor([*map(int, prompt), *map(int, response)])
        logprobs = model(ids[None]).logits[0, :-1].detach().log_softmax(dim=-1)
        nats = -logprobs[range(len(ids) - 1), ids[1:]]
        losses[""] += nats.tolist()
        losses["response_"] += nats[len(prompt) - 1 :].tolist()
    metrics = json.loads((quick.folder / "output/eval/sft/tiny/metrics.json").read_text())
    for prefix, nats in losses.items():
        assert metrics["after"][f"{prefix}tokens"] == len(nats)
        expected = math.exp(sum(nats) / len(nats))
        assert metrics["after"][f"{prefix}perplexity"] == pytest.approx(expected, rel=1e-3)
        low, high = metrics["intervals_95"]["after"][f"{prefix}perplexity"]
        assert low < expected < high
    assert metrics["rows"] == len(rows)


@pytest.fixture
def reward_job(tokenizer, tmp_path, monkeypatch, group):
    """A function that returns a job of train_reward on a small model and random pairs."""
    inputs = {name: tmp_path / name for name in ("model", "tokens")}
    save_model(make_causal(INIT, tokenizer, seed=1), tokenizer, inputs["model"])
    inputs["tokens"].mkdir()
    random = np.random.default_rng(1)
    for split, number in (("train", 16), ("eval", 8)):
        for field, length in (("prompt", 6), ("chosen", 5), ("rejected", 7)):
            with RaggedWriter(inputs["tokens"], f"{split}.{field}", len(tokenizer)) as writer:
                writer.write(random.integers(5, len(tokenizer), (number, length)).tolist())

    def make(**settings):
        result = tmp_path / "result"
        result.mkdir()
        return SimpleNamespace(
            spec={"rule": "train_reward", "name": "tiny"},
            settings=RewardSettings(**REWARD_SETTINGS | settings),
            placement=PLACEMENT,
            options=RunOptions(save_steps=20),
            inputs=inputs,
            result=result,
            states=tmp_path / "states",
            log_folder=tmp_path / "logs",
            facts={},
            record={},
        )

    return make


def metrics_of(job):
    return [json.loads(line) for line in (job.result / "metrics.jsonl").read_text().splitlines()]


def test_the_best_reward_model_is_saved(reward_job):
    # At this rate, some later evaluation is worse than an earlier one.
    job = reward_job(
        learning_rate=0.3, epochs=6, eval_steps=2, save_strategy="best", early_stopping_patience=3
    )
    train_reward.main(job)
    evaluated = [line for line in metrics_of(job) if "eval_loss" in line]
    best = min(evaluated[1:], key=lambda line: line["eval_loss"])
    assert evaluated.index(best) == len(evaluated) - 4
    assert {"eval_accuracy", "eval_margin"} <= best.keys()
    saved = Scorer(load_scorer(job.result, "fp32", AutoTokenizer.from_pretrained(job.result)))
    pairs = Examples.read(job.inputs["tokens"], "eval", "chosen", "rejected")
    scores = torch.from_numpy(response_scores(saved.eval(), pairs, 300))
    loss = pairwise_loss(*scores).mean().item()
    assert loss == pytest.approx(best["eval_loss"], rel=1e-4)


def test_max_steps_ends_a_training_and_its_schedule(reward_job):
    job = reward_job(epochs=6, max_steps=3, lr_schedule="linear")
    train_reward.main(job)
    rates = [line["learning_rate"] for line in metrics_of(job) if line["step"]]
    assert rates == pytest.approx([0.01, 0.01 * 2 / 3, 0.01 / 3])
