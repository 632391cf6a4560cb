"""Keys of former versions."""

import pytest

from snakechat.config.errors import ConfigError
from snakechat.config.renamed import RENAMED_KEYS
from snakechat.config.schema import config_schema, recipe_schema
from support.configs import config_values, load

CASES = {
    "config: rlhf.recipes.mine.samples was renamed: use num_generations": {
        "rlhf": {"recipes": {"mine": {"samples": 4}}}
    },
    "config: rlhf.defaults.beside was renamed: use compare_with": {
        "rlhf": {"defaults": {"beside": []}}
    },
    "config: rlhf.presets.mine.max_importance was renamed: use importance_sampling_cap": {
        "rlhf": {"presets": {"mine": {"max_importance": 1.0}}}
    },
    "config: sweeps.mine.over.sample_steps was renamed: use log_responses_steps": {
        "sweeps": {"mine": {"stage": "rlhf", "recipe": "tiny", "over": {"sample_steps": [1, 2]}}}
    },
    "config: sft.recipes.tiny.keep was renamed: use save_strategy": {
        "sft": {"recipes": {"tiny": {"keep": "best"}}}
    },
    "config: dpo.recipes.tiny.truncation_side was removed: delete it: a row keeps its last user"
    " turn (docs/en/datasets.md)": {"dpo": {"recipes": {"tiny": {"truncation_side": "right"}}}},
    "config: reward.recipes.tiny.expect was removed: use gate: {metric: accuracy, min: 0.65}"
    " (docs/en/evaluation.md)": {"reward": {"recipes": {"tiny": {"expect": {}}}}},
    "config: evaluate was renamed: use evaluation": {"evaluate": {"samples": 2}},
    "config: evaluation.bootstrap was renamed: use bootstrap_resamples": {
        "evaluation": {"bootstrap": 100}
    },
    "config: prompts was renamed: use prompt_sets": {"prompts": ["en"]},
    "config: models.tiny.prompts was renamed: use prompt_sets": {
        "models": {"tiny": {"prompts": ["toy"]}}
    },
}


@pytest.mark.parametrize("message", CASES)
def test_renamed_key_is_an_error_that_names_its_successor(message):
    with pytest.raises(ConfigError) as error:
        load(CASES[message])
    assert str(error.value) == message


def test_key_of_another_stage_keeps_its_name():
    """`keep` was a key of sft only; in reward it is an unknown key."""
    with pytest.raises(ConfigError, match=r"reward\.recipes\.tiny: Additional properties"):
        load({"reward": {"recipes": {"tiny": {"keep": "best"}}}})


@pytest.mark.parametrize("values", [{"rlhf": None}, {"sft": {"recipes": [1]}}, {"sweeps": 3}])
def test_values_of_a_wrong_type_are_left_to_the_schema(values):
    with pytest.raises(ConfigError, match="is not of type"):
        load(values)


def test_successors_exist():
    top = config_schema()["properties"]
    assert set(RENAMED_KEYS[""].values()) <= config_values().keys()
    assert set(RENAMED_KEYS["evaluation"].values()) <= top["evaluation"]["properties"].keys()
    for stage in ("sft", "rlhf"):
        keys = recipe_schema(stage)["properties"].keys()
        assert set(RENAMED_KEYS[stage].values()) <= keys
        assert keys.isdisjoint(RENAMED_KEYS[stage])
