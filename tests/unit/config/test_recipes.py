"""Recipes with all their settings, and what their names refer to."""

import pytest

from snakechat.config.recipes import STAGES
from snakechat.jobs.page_jobs import declared_licenses
from support.configs import load, project_values


@pytest.mark.parametrize(
    ("stage", "preset"),
    [(stage, name) for stage in STAGES for name in project_values()[stage]["presets"]],
)
def test_each_preset_of_the_project_is_valid_in_a_recipe(stage, preset):
    recipe = {"preset": preset, "datasets": ["toy"], "global_batch_size": 64}
    recipe |= {"actor": "sft/tiny"} if stage == "rlhf" else {"model": "tiny"}
    assert load({stage: {"recipes": {"mine": recipe}}}).recipe(stage, "mine")["seed"] == 1234


def test_a_recipe_overrides_its_preset_which_overrides_the_defaults():
    own = {"actor": "sft/tiny", "preset": "mine", "clip_range": 0.5}
    defaults = {"gamma": 0.9, "kl_coef": 0.3, "clip_range": 0.3}
    presets = {"mine": {"kl_coef": 0.4, "clip_range": 0.4}}
    changes = {"defaults": defaults, "presets": presets, "recipes": {"mine": own}}
    recipe = load({"rlhf": changes}).recipe("rlhf", "mine")
    assert (recipe["gamma"], recipe["kl_coef"], recipe["clip_range"]) == (0.9, 0.4, 0.5)


@pytest.mark.parametrize(
    ("own", "kl_in", "estimator"),
    [
        ({"algorithm": "ppo"}, "rewards", "k1"),
        ({"algorithm": "rloo", "num_generations": 2}, "loss", "k2"),
        ({"preset": "grpo"}, "loss", "k3"),
    ],
)
def test_the_algorithm_determines_where_the_kl_penalty_applies(own, kl_in, estimator):
    recipe = {**own, "actor": "sft/tiny", "reward": "reward/tiny", "global_batch_size": 64}
    settings = load({"rlhf": {"recipes": {"mine": recipe}}}).program_settings("rlhf", "mine")
    assert (settings["kl_in"], settings["kl_estimator"]) == (kl_in, estimator)


@pytest.mark.parametrize(
    ("default", "own", "changed"),
    [
        ({"deployment": "single_node", "threads": 8}, {}, {"threads": 8}),
        ({"threads": 8}, "single_node", {}),
        ({"threads": 8}, {"deployment": "single_node", "nodes": 2}, {"nodes": 2}),
    ],
)
def test_placement_of_a_recipe_overrides_that_of_the_defaults(default, own, changed):
    recipe = {"model": "tiny", "datasets": ["toy"], "placement": own}
    config = load({"sft": {"defaults": {"placement": default}, "recipes": {"mine": recipe}}})
    expected = config.values["deployments"]["single_node"] | changed
    assert config.recipe("sft", "mine")["placement"] == expected


@pytest.mark.parametrize(
    ("split", "weights"),
    [
        (["reward", "rlhf"], {"sft": 0, "reward": 1, "rlhf": 1}),
        ({"sft": 3, "reward": 0, "rlhf": 1}, {"sft": 3, "reward": 0, "rlhf": 1}),
        (None, {"sft": 1, "reward": 2, "rlhf": 2}),
        ({"sft": 0.1, "reward": 0.2, "rlhf": 0.2}, {"sft": 1, "reward": 2, "rlhf": 2}),
    ],
)
def test_the_split_of_a_dataset_is_phases_or_the_ratio_of_weights(split, weights):
    dataset = {"path": "mine", "format": "instruct", **({"split": split} if split else {})}
    labels = {"label": "mine", "llm_judge": "wise"}
    judge = {"url": "http://host/v1", "model": "wise", "rubric": "Be kind."}
    config = load({"datasets": {"mine": dataset, "labels": labels}, "llm_judges": {"wise": judge}})
    assert config.split_weights("mine") == weights
    assert config.split_weights("labels") == {"sft": 0, "reward": 1, "rlhf": 0}


def test_declared_licences_are_those_of_imports_and_fetches():
    datasets = {"a": {"hub": "lab/a", "format": "plain", "license": "MIT"}}
    models = {"c": {"hub": "lab/c", "license": "odc-by"}}
    licences = declared_licenses(load({"datasets": datasets, "models": models}))
    assert licences == {"output/data/a": "mit", "output/models/c": "odc-by"}
