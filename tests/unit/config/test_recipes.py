"""Recipes with all their settings, and what their names refer to."""

import dataclasses
from pathlib import Path

import pytest

from snakechat.config.schema import SETTINGS
from support.configs import load

SMALL = {
    "nodes": 1,
    "gpus_per_node": 2,
    "zero_stage": 2,
    "offload": "none",
    "activation_checkpointing": True,
    "micro_batch_tokens": 512,
    "threads": 4,
    "mem_mb": 2000,
    "runtime": 10,
}


@pytest.mark.parametrize("stage", SETTINGS)
def test_program_settings_are_the_fields_of_the_dataclass(stage):
    settings = load().program_settings(stage, "tiny")
    assert dataclasses.asdict(SETTINGS[stage](**settings)) == settings


def test_layers_of_settings():
    """A recipe overrides its preset, which overrides the defaults of the stage."""
    own = {"clip_range": 0.5}
    config = load(
        {
            "rlhf": {
                "defaults": {"gamma": 0.9, "kl_coef": 0.3, "clip_range": 0.3},
                "presets": {"mine": {"kl_coef": 0.4, "clip_range": 0.4}},
                "recipes": {"mine": {"actor": "tiny", "reward": "tiny", "preset": "mine", **own}},
            }
        }
    )
    recipe = config.recipe("rlhf", "mine")
    assert (recipe["gamma"], recipe["kl_coef"], recipe["clip_range"]) == (0.9, 0.4, 0.5)
    assert recipe["seed"] == config.values["seed"]
    assert "preset" not in recipe


@pytest.mark.parametrize(
    ("own", "kl_in", "estimator"),
    [
        ({"algorithm": "ppo"}, "rewards", "k1"),
        ({"algorithm": "rloo", "num_generations": 2}, "loss", "k2"),
        ({"algorithm": "grpo", "num_generations": 2, "kl_in": "rewards"}, "rewards", "k1"),
        ({"preset": "grpo"}, "loss", "k3"),
    ],
)
def test_the_algorithm_determines_where_the_kl_penalty_applies(own, kl_in, estimator):
    recipe = {**own, "actor": "tiny", "reward": "tiny", "global_batch_size": 64}
    settings = load({"rlhf": {"recipes": {"mine": recipe}}}).program_settings("rlhf", "mine")
    assert (settings["kl_in"], settings["kl_estimator"]) == (kl_in, estimator)


@pytest.mark.parametrize(
    ("default", "own", "expected"),
    [
        ({"deployment": "small", "threads": 8}, {}, {**SMALL, "threads": 8}),
        ({"deployment": "cpu", "threads": 8}, "small", SMALL),
        (
            {"deployment": "cpu", "threads": 8},
            {"deployment": "small", "nodes": 2},
            {**SMALL, "nodes": 2},
        ),
    ],
)
def test_placement_of_a_recipe_overrides_that_of_the_defaults(default, own, expected):
    config = load(
        {
            "deployments": {"small": SMALL},
            "sft": {
                "defaults": {"placement": default},
                "recipes": {"mine": {"model": "tiny", "datasets": ["toy"], "placement": own}},
            },
        }
    )
    assert config.recipe("sft", "mine")["placement"] == expected


def test_models_behind_a_recipe():
    config = load({"dpo": {"recipes": {"base": {"model": "opt-125m"}}}})
    assert config.base_model("sft", "tiny") == ("init_model", "tiny")
    assert config.base_model("sft", "125m") == ("fetch_model", "opt-125m")
    assert config.base_model("dpo", "tiny") == ("train_sft", "tiny")
    assert config.base_model("dpo", "base") == ("fetch_model", "opt-125m")
    for stage in SETTINGS:
        assert config.tokenizer_model(stage, "tiny") == ("init_model", "tiny")
    assert config.tokenizer_model("rlhf", "1.3b") == ("fetch_model", "opt-1.3b")


def test_paths_are_relative_to_the_snakefile(tmp_path, monkeypatch):
    config = load()
    config.root = tmp_path / "project"
    monkeypatch.chdir(tmp_path)
    assert config.source_of("datasets", "local") == Path("project/data")
    assert config.source_of("datasets", "toy") is None
    assert config.local_path("/data/mine").resolve() == Path("/data/mine")


# Scripts of DeepSpeed-Chat by recipe: batch size over all GPUs, learning rate, epochs, LoRA rank.
SCRIPTS = {
    "sft/1.3b-single-node": (64, 9.65e-6, 16, 0),
    "sft/1.3b-single-node-lora": (64, 5e-4, 16, 128),
    "sft/6.7b-single-gpu": (128, 5e-4, 16, 128),
    "sft/llama2-7b-lora": (32, 5e-4, 4, 128),
    "reward/350m-single-node": (32, 5e-5, 1, 0),
    "reward/350m-multi-node": (128, 5e-5, 1, 0),
    "reward/llama2-7b-lora": (64, 5e-4, 1, 128),
    "dpo/350m-single-node": (32, 5e-5, 1, 0),
    "dpo/350m-multi-node": (128, 5e-5, 1, 0),
    "dpo/llama2-7b-lora": (32, 5e-4, 1, 128),
    "rlhf/1.3b-single-node": (32, 9.65e-6, 1, 0),
    "rlhf/1.3b-single-node-lora": (32, 5e-4, 1, 128),
    "rlhf/6.7b-single-gpu": (128, 5e-4, 1, 128),
    "rlhf/llama2-7b-lora": (8, 5e-4, 1, 64),
}


def test_recipes_have_the_numbers_of_the_scripts_of_deepspeed_chat():
    config = load({})
    found = {}
    for name in SCRIPTS:
        recipe = config.recipe(*name.split("/"))
        rate = recipe["actor_learning_rate" if name.startswith("rlhf") else "learning_rate"]
        found[name] = recipe["global_batch_size"], rate, recipe["epochs"], recipe["lora_rank"]
    assert found == SCRIPTS
    single_node, single_gpu = (config.recipe("rlhf", name) for name in ("1.3b-single-node", "1.3b"))
    assert (single_node["ema_decay"], single_gpu["ema_decay"]) == (0.992, 0)
