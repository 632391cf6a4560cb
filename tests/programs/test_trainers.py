"""Training programs: each loss and algorithm of config.yaml, in this process."""

import json
import math

import pytest
from safetensors.torch import load_file

from snakechat.config.recipes import STAGES
from snakechat.modeling.models import DTYPES
from support.configs import load
from support.stages import stages_of_small_model, toy_rows

# Two optimizer steps.
SIZES = {"epochs": 1, "datasets": ["toy"], "warmup_steps": 0, "lr_schedule": "constant"}
ONE_MODEL = {**SIZES, "model": "random", "max_length": 64, "global_batch_size": 8}
ONE_MODEL |= {"learning_rate": 0.01, "weight_decay": 0.0}
RLHF = {
    **SIZES,
    "actor": "sft/plain",
    "reward": "reward/plain",
    "max_prompt_length": 64,
    "max_response_length": 4,
    "rollout_batch_size": 8,
    "global_batch_size": 16,
    "num_generations": 2,
    "actor_learning_rate": 0.01,
    "critic_learning_rate": 0.01,
}


def shipped_kinds():
    """The stage and the keys of the first recipe of each loss and algorithm in config.yaml."""
    config, kinds = load(), {}
    for stage in STAGES:
        for name, keys in config.values[stage]["recipes"].items():
            recipe = config.recipe(stage, name)
            kinds.setdefault((stage, recipe.get("algorithm"), recipe.get("loss")), keys)
    return {"-".join(filter(None, kind)): (kind[0], keys) for kind, keys in kinds.items()}


SHIPPED = shipped_kinds()


@pytest.fixture(scope="module")
def stages(tokenizer, group, tmp_path_factory):
    """The results of recipes on a small model, in a working directory of their own."""
    recipes = {"sft": {"plain": recipe("fp32")}, "reward": {"plain": recipe("fp32", epochs=8)}}
    folder = tmp_path_factory.mktemp("trainers")
    with stages_of_small_model(folder, tokenizer, toy_rows(16), recipes) as stages:
        yield stages


def recipe(dtype, stage="sft", **settings):
    """A recipe of a stage with the sizes of these tests."""
    sizes = RLHF if stage == "rlhf" else ONE_MODEL
    return {**sizes, "dtype": dtype, "placement": "cpu", **settings}


@pytest.mark.parametrize("kind", SHIPPED)
def test_each_shipped_kind_of_recipe_trains(kind, stages):
    stage, keys = SHIPPED[kind]
    own = {"placement", *(RLHF if stage == "rlhf" else ONE_MODEL)}
    keys = {key: value for key, value in keys.items() if key not in own}
    if keys.get("algorithm") == "distill":
        # The model that its actor starts from.
        keys["teacher"] = "sft/plain"
    dtype = keys.pop("dtype", "bf16")
    stages.config.values[stage]["recipes"][kind] = recipe(dtype, stage, **keys)
    folder = stages.result(f"train_{stage}", kind)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["step"]]
    assert len(steps) >= 2
    assert all(math.isfinite(value) for line in steps for value in line.values() if value)
    # All weights have the dtype that config.json states.
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {DTYPES[dtype]}
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(DTYPES[dtype])[6:]
