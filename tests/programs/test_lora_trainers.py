"""Each trainer with LoRA, and with each combination of dtype and placement in config.yaml.

In one process; tests/unit/training/test_processes.py trains adapters in two.
"""

import json
import math

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from snakechat.config.recipes import STAGES
from snakechat.modeling.loading import load_causal, load_scorer
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
# Of a recipe in config.yaml.
TRAINING_KEYS = ("algorithm", "dtype", "lora_rank", "critic_lora_rank", "train_base")
TRAINING_KEYS += ("loss", "label_smoothing", "margin", "sft_coef")
TRAINING_KEYS += ("scale_by_std", "loss_aggregation", "importance_sampling_level")
TRAINING_KEYS += ("clip_range_high", "drop_uniform_groups")
# With `distill`: the model that its actor starts from.
TEACHER = {"teacher": "sft/plain"}
PLACEMENT_KEYS = ("zero_stage", "critic_zero_stage", "offload", "offload_frozen")
PLACEMENT_KEYS += ("activation_checkpointing",)


def shipped_combinations():
    """A stage, settings and placement of each combination in config.yaml, by a name of it."""
    config, combinations = load(), {}
    for stage in STAGES:
        for name in config.values[stage]["recipes"]:
            recipe = config.recipe(stage, name)
            settings = {key: recipe[key] for key in TRAINING_KEYS if key in recipe}
            settings |= TEACHER if settings.get("algorithm") == "distill" else {}
            for rank in ("lora_rank", "critic_lora_rank"):
                # The matrices here are smaller than the ranks there.
                settings[rank] = 4 if settings.get(rank) else 0
            if stage != "rlhf":
                settings.pop("critic_lora_rank")
            placement = recipe["placement"]
            placement = {key: placement[key] for key in PLACEMENT_KEYS if key in placement}
            combination = stage, settings, placement
            if combination not in combinations.values():
                combinations[f"{stage}/{name}"] = combination
    return combinations


SHIPPED = shipped_combinations()


@pytest.fixture(scope="module")
def stages(tokenizer, group, tmp_path_factory):
    """The results of recipes on a small model, in a working directory of their own."""
    train = toy_rows(16)["train"]
    # The models learn these pairs, and would need more to do well on others.
    records = {"train": train, "eval": train[:12]}
    recipes = {"sft": {"plain": recipe("fp32")}, "reward": {"plain": recipe("fp32", epochs=8)}}
    folder = tmp_path_factory.mktemp("lora")
    with stages_of_small_model(folder, tokenizer, records, recipes) as stages:
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


def check_result(folder, dtype):
    """The metrics are finite, and all weights have the dtype that config.json states."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"]]
    assert len(steps) >= 2
    assert all(math.isfinite(value) for line in steps for value in line.values() if value)
    weights = load_file(folder / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {DTYPES[dtype]}
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(DTYPES[dtype])[6:]
    return weights


# One of each loss and algorithm.
KINDS = {
    (stage, settings.get("algorithm"), settings.get("loss")): name
    for name, (stage, settings, _) in reversed(SHIPPED.items())
}


@pytest.mark.parametrize("name", KINDS.values())
def test_each_shipped_combination_trains(name, train):
    stage, settings, placement = SHIPPED[name]
    settings = dict(settings)
    folder = train(stage, settings.pop("dtype"), placement, **settings)
    check_result(folder, SHIPPED[name][1]["dtype"])
    assert (folder / "adapter").exists() == bool(settings["lora_rank"])


def start_of(stage, stages):
    """The folder of the model that a recipe of a stage starts from."""
    return stages.result(
        *(("train_sft", "plain") if stage == "rlhf" else ("fetch_model", "random"))
    )


@pytest.mark.parametrize(
    ("stage", "dtype", "zero_stage"),
    [("sft", "bf16", 3), ("reward", "bf16", 3), ("dpo", "fp16", 3), ("ppo", "bf16", 3)],
)
def test_each_trainer_trains_and_merges_adapters(
    stage, dtype, zero_stage, train, stages, tokenizer, fp16_on_cpu
):
    # In fp16, a run first skips the steps whose gradients overflow the initial loss scale.
    settings = {**LORA, "epochs": 4 if dtype == "fp16" else 1}
    if stage == "ppo":
        settings |= {"critic_lora_rank": 4, "critic_lora_alpha": 8}
    section = "rlhf" if stage in ("ppo", "grpo") else stage
    if section == "rlhf":
        settings["algorithm"] = stage
    folder = train(section, dtype, {"zero_stage": zero_stage}, **settings)
    merged = check_result(folder, dtype)
    start = start_of(section, stages)
    base = load_file(start / "model.safetensors")
    layers = [name for name in base if name.endswith(("_proj.weight", "fc1.weight", "fc2.weight"))]
    assert len(layers) == 12
    for name, weight in base.items():
        is_changed = not torch.equal(merged[name].float(), weight.to(DTYPES[dtype]).float())
        assert is_changed == (name in layers), name
    # The adapter on the base gives the merged model, up to rounding.
    auto_class, load_base = AutoModelForCausalLM, load_causal
    if stage == "reward":
        auto_class, load_base = AutoModelForSequenceClassification, load_reward_base
    base_model = load_base(start, "fp32", tokenizer)
    adapted = PeftModel.from_pretrained(base_model, folder / "adapter").eval()
    ids = torch.tensor([[0, 9, 8, 7, 6, 5, 40]])
    with torch.no_grad():
        expected = adapted(ids).logits
        logits = auto_class.from_pretrained(folder, dtype="float32").eval()(ids).logits
    tolerance = {"fp32": 1e-4, "bf16": 0.05, "fp16": 0.01}[dtype] * expected.abs().max().item()
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)


def load_reward_base(folder, dtype, tokenizer):
    """A model with a new score head, which the adapter replaces."""
    return load_scorer(folder, dtype, tokenizer, new_head=True)


@pytest.mark.parametrize("stage", ["sft", "rlhf"])
def test_each_trainer_also_trains_embeddings_and_norms(stage, train, stages):
    dtype = "bf16"
    settings = {"algorithm": "ppo", "critic_lora_rank": 4} if stage == "rlhf" else {}
    settings |= {**LORA, "train_base": "embeddings_and_norms"}
    folder = train(stage, dtype, {"zero_stage": 3}, **settings)
    merged = check_result(folder, dtype)
    assert not (folder / "adapter").exists()
    start = start_of(stage, stages)
    base = load_file(start / "model.safetensors")
    changed = {
        name
        for name, weight in base.items()
        if not torch.equal(merged[name].float(), weight.to(DTYPES[dtype]).float())
    }
    assert {name for name in changed if "embed_tokens" in name}
    assert {name for name in changed if "layer_norm" in name}
    assert {name for name in changed if "fc1.weight" in name}
