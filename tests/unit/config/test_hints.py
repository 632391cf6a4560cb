"""Hints in errors about keys that the config does not have."""

import pytest

from snakechat.config.errors import ConfigError
from snakechat.config.hints import NAMES_ELSEWHERE
from snakechat.config.schema import SETTINGS, placement_schema, recipe_schema
from support.configs import load


@pytest.mark.parametrize(
    ("place", "key", "hint"),
    [
        ("sft", "num_train_epochs", " (it is epochs here)"),
        ("rlhf", "beta", " (it is kl_coef here)"),
        ("dpo", "learning_rat", " (did you mean learning_rate?)"),
        ("dpo", "unheard_of", ""),
    ],
)
def test_an_unknown_key_of_a_recipe(place, key, hint):
    with pytest.raises(ConfigError) as error:
        load({place: {"recipes": {"tiny": {key: 1}}}})
    assert str(error.value) == (
        f"config: {place}.recipes.tiny: Additional properties are not allowed"
        f" ('{key}' was unexpected){hint}"
    )


def test_a_section_with_few_keys_lists_them():
    with pytest.raises(ConfigError, match=r"\(available: defaults, recipes\)$"):
        load({"sft": {"mine": {"epochs": 1}}})


def test_hints_name_keys_that_exist():
    keys = {key for stage in SETTINGS for key in recipe_schema(stage)["properties"]}
    keys |= {f"placement.{key}" for key in placement_schema("sft")["properties"]}
    for names in NAMES_ELSEWHERE.values():
        assert keys.issuperset(names)
