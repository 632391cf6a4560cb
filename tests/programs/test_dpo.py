"""DPO and its variants: training and evaluation on the pairs of a toy, in this process."""

import json
import math
import random
from types import SimpleNamespace

import pytest

import evaluate_dpo
from snakechat.config.job_settings import dpo_evaluation_settings
from snakechat.data import toy
from support.stages import stages_of_small_model

# DeepSpeed calls functions of torch that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SIZES = {"epochs": 8, "max_length": 64, "global_batch_size": 8, "learning_rate": 0.003}
RECIPES = {
    "dpo": {},
    "conservative": {"label_smoothing": 0.1},
    "normalized": {"length_normalized": True, "beta": 2.0},
    "robust": {"loss": "robust", "label_smoothing": 0.1},
    "ipo": {"loss": "ipo"},
    "simpo": {"loss": "simpo", "beta": 2.0, "margin": 0.5},
    "orpo": {"loss": "orpo", "beta": 1.0, "sft_coef": 1.0},
    "rpo": {"sft_coef": 1.0},
}


@pytest.fixture(scope="module")
def stages(tokenizer, group, tmp_path_factory):
    """Trainings of a small random model on 32 pairs, which are also those of the evaluation."""
    rows, _ = toy.make_rows(32, 0, random.Random(1))
    records = [tuple(row.values()) for row in rows]
    common = {**SIZES, "model": "random", "datasets": ["toy"], "weight_decay": 0.0}
    common |= {"dtype": "fp32", "placement": {"deployment": "cpu"}}
    recipes = {name: {**common, **changes} for name, changes in RECIPES.items()}
    rows = {"train": records, "eval": records}
    folder = tmp_path_factory.mktemp("dpo")
    with stages_of_small_model(folder, tokenizer, rows, {"dpo": recipes}) as stages:
        yield stages


def evaluate(stages, name, folder):
    """Return the metrics of a trained recipe."""
    keys = {"model": "train_dpo", "tokens": "tokenize_dpo", "reference": "compute_reference"}
    inputs = {key: stages.made.get((rule, name)) for key, rule in keys.items()}
    settings = SimpleNamespace(**dpo_evaluation_settings(stages.config, name))
    placement = stages.placement("train_dpo", name)
    job = SimpleNamespace(settings=settings, inputs=inputs, placement=placement, result=folder)
    evaluate_dpo.main(job)
    return json.loads((folder / "metrics.json").read_text())


@pytest.mark.parametrize("name", RECIPES)
def test_each_loss_learns_to_prefer_the_chosen_responses(name, stages, tmp_path):
    result = stages.result("train_dpo", name)
    steps = [json.loads(line) for line in (result / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if step["step"]]
    assert steps[-1]["loss"] < steps[0]["loss"]
    # A reference model starts with log ratios of 0.
    initial = {"dpo": math.log(2), "conservative": math.log(2), "normalized": math.log(2)}
    initial |= {"robust": math.log(2), "ipo": 1 / (4 * 0.1**2)}
    if name in initial:
        assert steps[0]["loss"] == pytest.approx(initial[name], rel=1e-4)
    assert (("compute_reference", name) in stages.made) == (name not in ("simpo", "orpo"))
    metrics = evaluate(stages, name, tmp_path)
    assert metrics["accuracy"] >= 0.8
    # The evaluation has the loss of the last steps, over the same pairs.
    assert metrics["loss"] < steps[0]["loss"]


def test_the_sft_loss_makes_chosen_responses_likelier(stages):
    def last_chosen_score(name):
        lines = (stages.result("train_dpo", name) / "metrics.jsonl").read_text().splitlines()
        return json.loads(lines[-1])["chosen_score"]

    assert last_chosen_score("rpo") > last_chosen_score("dpo")
