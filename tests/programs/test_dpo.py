"""DPO and its variants: training and evaluation on the pairs of a toy, in this process."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.stages import stages_of_small_model, toy_rows

COMMON = {"model": "random", "datasets": ["toy"], "max_length": 64, "epochs": 8, "dtype": "fp32"}
COMMON |= {"global_batch_size": 8, "learning_rate": 0.003, "weight_decay": 0.0}
COMMON["placement"] = {"deployment": "cpu"}
RECIPES = {
    "dpo": {},
    "simpo": {"loss": "simpo", "beta": 2.0, "margin": 0.5},
}


@pytest.fixture(scope="module")
def stages(tokenizer, group, tmp_path_factory):
    """Trainings of a small random model on 32 pairs, evaluated on the same pairs."""
    recipes = {name: {**COMMON, **changes} for name, changes in RECIPES.items()}
    folder = tmp_path_factory.mktemp("dpo")
    with stages_of_small_model(folder, tokenizer, toy_rows(32), {"dpo": recipes}) as stages:
        yield stages


def lines_of(result):
    """Return the metrics of a training by step."""
    return [json.loads(line) for line in (result / "metrics.jsonl").read_text().splitlines()]


def evaluate(stages, name):
    """Return the metrics of a trained recipe."""
    return json.loads((stages.result("evaluate_dpo", name) / "metrics.json").read_text())


@pytest.mark.parametrize("name", RECIPES)
def test_each_loss_learns_to_prefer_the_chosen_responses(name, stages):
    steps = lines_of(stages.result("train_dpo", name))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert (("compute_reference", name) in stages.made) == (name == "dpo")
    if name == "dpo":
        # It starts with log ratios of 0: before the first update, all margins are rounding.
        assert steps[0]["loss"] == pytest.approx(math.log(2), rel=1e-4)
        assert (steps[0]["accuracy"], steps[0]["ties"]) == (0, 1)
    metrics = evaluate(stages, name)
    assert metrics["accuracy"] >= 0.8
    # The evaluation has the loss of the last steps, over the same pairs.
    assert metrics["loss"] < steps[0]["loss"]


@pytest.fixture(scope="module")
def unpaired(tokenizer, group, tmp_path_factory):
    """KTO on responses that are labelled good or bad, twice as many good ones."""
    records = [
        (prompt, None, rejected) if number % 3 == 0 else (prompt, chosen, None)
        for number, (prompt, chosen, rejected) in enumerate(toy_rows(48)["train"])
    ]
    rows = {"train": records, "eval": records}
    kto = {**COMMON, "loss": "kto", "undesirable_weight": 2.0, "eval_steps": 12}
    recipes = {"kto": {**kto, "save_strategy": "best"}}
    folder = tmp_path_factory.mktemp("kto")
    with stages_of_small_model(folder, tokenizer, rows, {"dpo": recipes}) as stages:
        yield stages


def test_kto_learns_from_single_responses(unpaired):
    steps = lines_of(unpaired.result("train_dpo", "kto"))
    evaluated = {step["step"]: step["eval_loss"] for step in steps if "eval_loss" in step}
    assert list(evaluated) == [0, 12, 24, 36, 48]
    # Good responses weigh 1, bad ones 2.
    assert evaluated[0] == pytest.approx((32 * 1 + 16 * 2) / 48 / 2, rel=1e-4)
    metrics = evaluate(unpaired, "kto")
    assert metrics["responses"] == 48 and metrics["share_good"] == 32 / 48
    assert metrics["auc"] > 0.9 and 0.3 < metrics["longer_wins_auc"] < 0.7
    assert metrics["good_score"] > metrics["bad_score"]
    low, high = metrics["intervals_95"]["auc"]
    assert low < metrics["auc"] <= high
    # The saved model is the best one.
    best = min(loss for step, loss in evaluated.items() if step)
    assert metrics["loss"] == pytest.approx(best, rel=1e-4)


def test_the_loss_is_exact_in_16_bits_until_the_policy_changes(tokenizer, group, tmp_path):
    # Eight steps are two epochs, in which a row is packed with other rows each. The learning rate
    # is too small to change a weight; large weights and beta amplify rounding errors.
    recipe = {**COMMON, "loss": "kto", "dtype": "bf16", "beta": 5.0}
    recipe |= {"max_length": 96, "max_steps": 8, "learning_rate": 1e-12}
    recipe |= {"lr_schedule": "linear", "warmup_steps": 0}
    recipes = {"dpo": {"still": recipe}}
    with stages_of_small_model(tmp_path, tokenizer, toy_rows(32), recipes, init_std=0.5) as stages:
        steps = lines_of(stages.result("train_dpo", "still"))
    assert [step["loss"] for step in steps] == pytest.approx([0.5] * 8, abs=2e-4)
    # max_steps ends the schedule too.
    rates = [step["learning_rate"] for step in steps]
    assert rates == pytest.approx([1e-12 * (8 - n) / 8 for n in range(8)], abs=1e-18)


def weights_in(folder):
    """Return the weights of a saved model by name."""
    return load_file(folder / "model.safetensors")


def test_a_short_training_in_16_bits_states_what_its_weights_keep(
    tokenizer, group, tmp_path, capsys
):
    recipe = {**COMMON, "dtype": "bf16", "max_length": 96, "max_steps": 2, "learning_rate": 1e-5}
    recipes = {"short": recipe, "exact": {**recipe, "save_dtype": "fp32"}}
    with stages_of_small_model(tmp_path, tokenizer, toy_rows(32), {"dpo": recipes}) as stages:
        jobs = {name: stages.run("train_dpo", name) for name in recipes}
        folders = {name: stages.result("train_dpo", name).resolve() for name in recipes}
    printed = capsys.readouterr()
    base = {name: weight.bfloat16() for name, weight in weights_in(tmp_path / "base").items()}
    saved = {name: weights_in(folder) for name, folder in folders.items()}
    total = sum(weight.numel() for weight in base.values())
    shares = {
        name: sum(int((of[key] != base[key]).sum()) for key in base) / total
        for name, of in saved.items()
    }
    assert {name: job.facts["changed_weights"] for name, job in jobs.items()} == shares
    assert shares["short"] < 0.3 and shares["exact"] > 0.9
    assert f"{shares['short']:.1%} of the trained weights differ from" in printed.out
    assert printed.err.count("rounding has discarded most of the training: set save_dtype:") == 1
    # Both trained alike.
    assert all(torch.equal(saved["exact"][key].bfloat16(), saved["short"][key]) for key in base)
    assert {weight.dtype for weight in saved["exact"].values()} == {torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folders["exact"], dtype="auto")
    assert model.dtype == torch.float32


def test_a_saved_step_whose_learning_rate_was_zero_is_the_cause(tokenizer, group, tmp_path, capsys):
    recipe = {**COMMON, "dtype": "bf16", "max_length": 96, "max_steps": 1, "warmup_steps": 1}
    recipe |= {"save_strategy": "best", "eval_steps": 1}
    with stages_of_small_model(tmp_path, tokenizer, toy_rows(32), {"dpo": {"a": recipe}}) as stages:
        facts = stages.run("train_dpo", "a").facts
    printed = capsys.readouterr()
    expected = {"saved_step": 1, "changed_weights": 0.0, "unchanged_because": "learning_rate"}
    assert facts == expected
    assert "saved the model of step 1, the best on held-out rows" in printed.out
    assert "from step 1, and the learning rate was 0 until then" in printed.err
    assert "rounding" not in printed.err
