"""Values of the command line, nested updates and sweeps."""

import datetime
import math

import pytest

from snakechat.config.loading import parse_command_line_values, update
from snakechat.config.schema import ConfigError
from support.configs import load, tiny


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("2.0e-5", 2e-5),
        ("1e-5", "1e-5"),
        ({"sft": {"defaults": {"epochs": "2"}}}, {"sft": {"defaults": {"epochs": 2}}}),
        ({"hub": "gpt2", "revision": "0012345"}, {"hub": "gpt2", "revision": "0012345"}),
    ],
)
def test_values_of_the_command_line_are_read_as_yaml(text, value):
    parsed = parse_command_line_values(text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize("value", [math.inf, datetime.date(2026, 1, 2), "\ud83d"])
def test_a_value_that_a_spec_cannot_have_is_an_error_with_its_key(value):
    arguments = {"shop": {"weight": 1, "arguments": {"sizes": [value]}}}
    place = "rlhf.recipes.tiny.reward_functions"
    with pytest.raises(ConfigError, match=f"^config: {place}: expected text in UTF-8, finite"):
        load(tiny("rlhf", reward_functions=arguments))
    with pytest.raises(ConfigError, match=r"^config: models\.tiny\.init\.size: expected text in"):
        load({"models": {"tiny": {"init": {"size": value}}}})


def test_update_separates_aliases():
    shared = {"deployment": "cpu"}
    values = {}
    update(values, {"a": shared, "b": shared})
    update(values, {"a": {"threads": 8}})
    assert values == {"a": {"deployment": "cpu", "threads": 8}, "b": {"deployment": "cpu"}}


def test_command_line_overrides_config_files():
    changes = {"sft": {"defaults": {"epochs": 2, "seed": 5}}}
    config = load(changes, command_line={"sft": {"defaults": {"epochs": "3"}}, "seed": "7"})
    recipe = config.recipe("sft", "1.3b")
    assert (recipe["epochs"], recipe["seed"], config.values["seed"]) == (3, 5, 7)


def sweep(name="mine", **settings):
    """Return a sweep over the tiny recipe of rlhf."""
    over = {"kl_coef": [0.1, 0.2], "seed": [1, 2]}
    return {"sweeps": {name: {"stage": "rlhf", "recipe": "tiny", "over": over, **settings}}}


def test_sweep_adds_a_recipe_for_each_combination():
    config = load(sweep())
    names = [f"mine-kl_coef-{kl}-seed-{seed}" for kl in (0.1, 0.2) for seed in (1, 2)]
    assert list(config.swept_settings["mine"]) == names
    for name in names:
        recipe = config.recipe("rlhf", name)
        changed = {key for key in recipe if recipe[key] != config.recipe("rlhf", "tiny")[key]}
        assert changed <= {"kl_coef", "seed"}
    assert config.recipe("rlhf", names[2])["kl_coef"] == 0.2
    assert config.compared_recipes("rlhf", "mine") == names
    assert config.compared_recipes("rlhf", "tiny-vs-mine") == ["tiny", *names]
    # A slash is no part of a name.
    config = load(sweep(over={"actor": ["models/tiny"]}))
    assert config.origin("rlhf", "mine-actor-models-tiny") == ("models", "tiny")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (sweep("tiny"), "config: sweeps.tiny has the name of a recipe of rlhf"),
        (sweep(recipe="tinny"), "config: sweeps.mine.recipe names 'tinny', which is not under"),
        (
            sweep(over={"kl_coeff": [1]}),
            "config: sweeps.mine.over.kl_coeff: unknown key (did you mean kl_coef",
        ),
        (
            {
                **sweep(over={"seed": [1]}),
                "rlhf": {"recipes": {"mine-seed-1": {"actor": "sft/tiny"}}},
            },
            "config: sweeps.mine makes recipe mine-seed-1, which exists",
        ),
    ],
)
def test_invalid_sweep(changes, message):
    with pytest.raises(ConfigError) as error:
        load(changes)
    assert str(error.value).startswith(message)


def test_a_log_is_a_column_of_comparisons():
    config = load({"logs": {"original": "training.log"}})
    assert config.compared_recipes("sft", "tiny-vs-original") == ["tiny", "original"]
    for section in ({"logs": {"tiny": "a"}}, {**sweep(), "logs": {"mine": "a"}}):
        with pytest.raises(ConfigError, match=r"logs\.\w+ has the name of a recipe or a sweep"):
            load(section)


def test_comparison_needs_two_recipes():
    with pytest.raises(ConfigError, match="output/compare/rlhf/tiny-vs-tiny: name two recipes"):
        load().compared_recipes("rlhf", "tiny-vs-tiny")
