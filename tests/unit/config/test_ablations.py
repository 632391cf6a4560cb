"""Sweeps over `leave_out`: recipes without datasets, and what stays the same."""

import pytest

from snakechat.config.errors import ConfigError
from snakechat.config.job_settings import (
    dpo_evaluation_settings,
    held_out_tokens,
    rlhf_evaluation_inputs,
    rlhf_evaluation_settings,
)
from support.configs import load


def shop(seed):
    return {"generate": "shop", "rows": 60, "eval_rows": 10, "seed": seed}


def lineage(**sweep):
    """A chat model of two datasets, of which its reward model has one; and a sweep."""
    settings = {"stage": "rlhf", "recipe": "both", "over": {"leave_out": [[], ["a"]]}, **sweep}
    actor = {"actor": "both", "judge": "judge"}
    return {
        "datasets": {"a": shop(1), "b": shop(2), "c": shop(3)},
        "sft": {"recipes": {"both": {"model": "tiny", "datasets": ["a", {"b": 0.5}]}}},
        "reward": {"recipes": {"one": {"model": "sft/both", "datasets": ["b"]}}},
        "rlhf": {"recipes": {"both": {**actor, "reward": "one", "datasets": ["a", "b"]}}},
        "sweeps": {"mine": settings},
    }


def with_recipe(stage, name, **settings):
    changes = lineage()
    changes.setdefault(stage, {"recipes": {}})["recipes"][name] = settings
    return changes


def test_datasets_are_left_out_of_the_whole_lineage():
    config = load(lineage(over={"leave_out": [["a"], []], "seed": [1, 2]}))
    # The model of all data comes first, and is that of the config.
    assert config.compared_recipes("rlhf", "mine") == [
        f"mine-leave_out-{datasets}-seed-{seed}" for datasets in ("none", "a") for seed in (1, 2)
    ]
    all_data = config.recipe("rlhf", "mine-leave_out-none-seed-2")
    assert (all_data["actor"], all_data["datasets"], all_data["seed"]) == ("both", ["a", "b"], 2)
    without = config.recipe("rlhf", "mine-leave_out-a-seed-2")
    assert without == {
        **all_data,
        "actor": "both-leave_out-a",
        # It has none of the dataset itself, but its SFT model has.
        "reward": "one-leave_out-a",
        "datasets": ["b"],
    }
    assert config.recipe("sft", "both-leave_out-a")["datasets"] == [{"b": 0.5}]
    reward = config.recipe("reward", "one-leave_out-a")
    assert (reward["model"], reward["datasets"]) == ("sft/both-leave_out-a", ["b"])
    # The judge measures, and stays.
    assert "judge-leave_out-a" not in config.values["reward"]["recipes"]


def test_recipes_that_do_not_use_a_dataset_are_reused():
    changes = lineage()
    changes["sft"]["recipes"]["both"]["datasets"] = ["b"]
    config = load(changes)
    without = config.recipe("rlhf", "mine-leave_out-a")
    assert (without["actor"], without["reward"]) == ("both", "one")
    assert [recipe for recipe in config.values["sft"]["recipes"] if "leave_out" in recipe] == []


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ({"one": 0.5, "judge": 1}, {"one-leave_out-a": 0.5, "judge": 1}),
        ("reward/one", "reward/one-leave_out-a"),
        ("judge", "judge"),
        (None, None),
    ],
)
def test_all_forms_of_a_reference_are_followed(reward, expected):
    changes = lineage()
    recipe = changes["rlhf"]["recipes"]["both"]
    recipe |= {"reward": reward, "reward_functions": {"shop": 1}, "ptx": "both"}
    without = load(changes).recipe("rlhf", "mine-leave_out-a")
    assert (without["reward"], without["ptx"]) == (expected, "both-leave_out-a")


def test_all_models_are_evaluated_on_the_same_rows():
    config = load(lineage(over={"leave_out": [[], ["a"]], "seed": [1, 2]}))
    names = [f"mine-leave_out-{datasets}-seed-2" for datasets in ("none", "a")]
    settings = [rlhf_evaluation_settings(config, name) for name in names]
    for key in ("datasets", "seed", "exact_check", "judge", "num_prompts"):
        assert settings[0][key] == settings[1][key]
    tokens = {rlhf_evaluation_inputs(config, name)["tokens"] for name in names}
    assert tokens == {("tokenize_rlhf", names[0])}
    assert held_out_tokens(config, "sft", "both-leave_out-a") == ("tokenize_sft", "both")
    # What was trained on is known too, for contamination.
    assert settings[1]["trained_on"] == {"b": ["reward", "rlhf", "sft"]}


def test_dpo_is_evaluated_with_the_reference_of_its_own_model():
    dpo = {"model": "sft/both", "datasets": ["a", "b"]}
    changes = with_recipe("dpo", "both", **dpo)
    changes["sweeps"]["mine"]["stage"] = "dpo"
    config = load(changes)
    held_out = config.held_out_recipe("dpo", "mine-leave_out-a")
    recipe = config.recipe("dpo", held_out)
    assert (recipe["model"], recipe["datasets"]) == ("sft/both-leave_out-a", ["a", "b"])
    assert dpo_evaluation_settings(config, "mine-leave_out-a")["datasets"] == ["a", "b"]
    # A reference that is the same is reused.
    changes["sft"]["recipes"]["both"]["datasets"] = ["b"]
    assert load(changes).held_out_recipe("dpo", "mine-leave_out-a") == "mine-leave_out-none"


def test_datasets_that_are_made_from_others_follow_them():
    changes = lineage()
    changes["datasets"] |= {
        "best": {"generations": "mixed", "select": "best"},
        "best-of-a": {"generations": "of-a", "select": "best"},
        "relabelled": {"label": "a", "llm_judge": "wise"},
    }
    changes["llm_judges"] = {"wise": {"url": "http://host/v1", "model": "m", "rubric": "r"}}
    generations = {"model": "sft/tiny", "reward": "tiny"}
    changes["generations"] = {
        "recipes": {
            "mixed": {**generations, "datasets": ["a", "c"]},
            "of-a": {**generations, "datasets": ["a"]},
        }
    }
    changes["sft"]["recipes"]["both"]["datasets"] = ["best", "best-of-a", "c"]
    changes["reward"]["recipes"]["one"]["datasets"] = ["relabelled", "b"]
    config = load(changes)
    assert config.recipe("sft", "both-leave_out-a")["datasets"] == ["best-leave_out-a", "c"]
    assert config.values["datasets"]["best-leave_out-a"]["generations"] == "mixed-leave_out-a"
    assert config.recipe("generations", "mixed-leave_out-a")["datasets"] == ["c"]
    assert config.recipe("reward", "one-leave_out-a")["datasets"] == ["b"]


def test_two_sweeps_share_the_recipes_before_theirs():
    changes = lineage()
    other = {"stage": "reward", "recipe": "one", "over": {"leave_out": [[], ["a"]]}}
    changes["sweeps"]["other"] = other
    config = load(changes)
    assert config.recipe("reward", "other-leave_out-a")["model"] == "sft/both-leave_out-a"


def test_a_sweep_has_none_of_the_expectations_of_its_recipe():
    changes = lineage()
    changes["rlhf"]["recipes"]["both"]["expect"] = {"rlhf.length": {"min": 1}}
    changes["sft"]["defaults"] = {"expect": {"after.perplexity": {"max": 9}}}
    config = load(changes)
    for recipe in (("rlhf", "mine-leave_out-none"), ("rlhf", "mine-leave_out-a")):
        assert config.recipe(*recipe)["expect"] == {}
    assert config.recipe("sft", "both-leave_out-a")["expect"] == {}


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"leave_out": [[], ["bb"]]}, "sweeps.mine.over.leave_out names 'bb', which is no dataset"),
        ({"leave_out": [[], ["c"]]}, "of a recipe before it (available: a, b)"),
        (
            {"leave_out": [[], ["b"]]},
            "without b, reward.recipes.one has no dataset left to train on",
        ),
        ({"leave_out": [["a"], ["b"]]}, "has no [], the model of all data"),
        ({"leave_out": [[], ["a"]], "kl_coef": [0.1]}, "put kl_coef into another sweep"),
        ({"leave_out": [[], ["a", "b"], ["b", "a"]]}, "recipe mine-leave_out-a-and-b twice"),
        ({"leave_out": [[], "a"]}, "sweeps.mine.over.leave_out.1: 'a' is not of type 'array'"),
        ({"leave_out": [[], ["a", "a"]]}, "has non-unique elements"),
        ({"leave_out": [[]]}, "sweeps.mine.over.leave_out: [[]] is too short"),
    ],
)
def test_mistakes_are_one_line(over, message):
    with pytest.raises(ConfigError) as error:
        load(lineage(over=over))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_name_that_is_taken_is_an_error():
    changes = with_recipe("sft", "both-leave_out-a", model="tiny", datasets=["b"])
    with pytest.raises(ConfigError, match="makes sft/both-leave_out-a, which exists: rename one"):
        load(changes)


def test_a_recipe_that_depends_on_itself_has_no_ablation():
    changes = lineage()
    changes["reward"]["recipes"]["one"]["datasets"] = ["own"]
    changes["datasets"]["own"] = {"generations": "own", "select": "best_and_worst"}
    changes["generations"] = {
        "recipes": {"own": {"model": "sft/tiny", "reward": "one", "datasets": ["a"]}}
    }
    with pytest.raises(ConfigError, match="depends on itself"):
        load(changes)
