"""Training programs: with LoRA, each loss and algorithm of config.yaml.

In one process; tests/unit/training/test_processes.py trains adapters in two.
"""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from snakechat.config.recipes import STAGES
from snakechat.modeling.models import DTYPES
from support.configs import load
from support.stages import stages_of_small_model, toy_rows

# DeepSpeed calls functions of torch that are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

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
LORA = {"lora_rank": 4, "lora_alpha": 8}


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
    folder = tmp_path_factory.mktemp("lora")
    with stages_of_small_model(folder, tokenizer, toy_rows(16), recipes) as stages:
        yield stages


def recipe(dtype, stage="sft", placement=(), **settings):
    """A recipe of a stage with the sizes of these tests."""
    placement = {"deployment": "cpu", **dict(placement)}
    sizes = RLHF if stage == "rlhf" else ONE_MODEL
    return {**sizes, "dtype": dtype, "placement": placement, **settings}


@pytest.fixture
def train(stages, request):
    """A function that trains a recipe and returns the folder of the model."""

    def train(stage, dtype, placement=(), **settings):
        name = request.node.name.translate({ord(mark): "-" for mark in "[]/, "})
        recipes = stages.config.values[stage]["recipes"]
        recipes[name] = recipe(dtype, stage, placement, **settings)
        return stages.result(f"train_{stage}", name)

    return train


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check_result(folder, dtype):
    """The metrics are finite, and all weights have the dtype that config.json states."""
    steps = [line for line in metrics_of(folder) if line["step"]]
    assert len(steps) >= 2
    assert all(math.isfinite(value) for line in steps for value in line.values() if value)
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {DTYPES[dtype]}
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(DTYPES[dtype])[6:]
    return weights


@pytest.mark.parametrize("kind", SHIPPED)
def test_each_shipped_kind_of_recipe_trains(kind, train, stages):
    stage, keys = SHIPPED[kind]
    own = {"placement", *(RLHF if stage == "rlhf" else ONE_MODEL)}
    keys = {key: value for key, value in keys.items() if key not in own}
    if keys.get("algorithm") == "distill":
        # The model that its actor starts from.
        keys["teacher"] = "sft/plain"
    dtype = keys.pop("dtype", "bf16")
    check_result(train(stage, dtype, **keys), dtype)


@pytest.mark.parametrize(
    ("stage", "dtype", "train_base", "zero_stage"),
    [
        ("sft", "bf16", "embeddings_and_norms", 3),
        ("reward", "bf16", "none", 3),
        # A run first skips the steps whose gradients overflow the initial loss scale.
        ("dpo", "fp16", "none", 2),
        ("rlhf", "bf16", "none", 0),
    ],
)
def test_each_trainer_trains_adapters(
    stage, dtype, train_base, zero_stage, train, stages, fp16_on_cpu
):
    settings = {**LORA, "train_base": train_base, "epochs": 4 if dtype == "fp16" else 1}
    start = "fetch_model", "random"
    if stage == "rlhf":
        settings |= {"algorithm": "ppo", "critic_lora_rank": 4, "critic_lora_alpha": 8}
        start = "train_sft", "plain"
    folder = train(stage, dtype, {"zero_stage": zero_stage}, **settings)
    merged = check_result(folder, dtype)
    assert (folder / "adapter").exists() == (train_base == "none")
    base = load_file(stages.result(*start) / "model.safetensors")
    changed = {
        name
        for name, weight in base.items()
        if not torch.equal(merged[name].float(), weight.to(DTYPES[dtype]).float())
    }
    layers = {name for name in base if name.endswith(("_proj.weight", "fc1.weight", "fc2.weight"))}
    assert len(layers) == 12 and layers <= changed
    others = "".join(changed - layers)
    trains_others = train_base != "none"
    assert ("embed_tokens" in others, "layer_norm" in others) == (trains_others, trains_others)
    assert trains_others or not others


def test_max_steps_ends_a_training_and_its_schedule(train):
    folder = train("reward", "fp32", epochs=6, max_steps=3, lr_schedule="linear")
    rates = [line["learning_rate"] for line in metrics_of(folder) if line["step"]]
    assert rates == pytest.approx([0.01, 0.01 * 2 / 3, 0.01 / 3])
